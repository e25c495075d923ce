"""Limit of open calls: the deployment with the fewest goes first."""

from __future__ import annotations

import asyncio

from specdecode_operator.telemetry.call_slots import CallSlots
from specdecode_operator.types import Key

BUSY, OTHER = ("ns", "busy"), ("ns", "other")


class Calls:
    """Calls that hold their slot until they are released."""

    def __init__(self, slots: CallSlots) -> None:
        self._slots = slots
        self._ends: list[tuple[Key, asyncio.Event]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.open: list[Key] = []

    async def start(self, key: Key, count: int = 1) -> None:
        self.tasks += [asyncio.create_task(self._call(key)) for _ in range(count)]
        await self.settle()

    async def end_one(self, key: Key) -> None:
        index = next(i for i, (owner, _) in enumerate(self._ends) if owner == key)
        self._ends.pop(index)[1].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _call(self, key: Key) -> None:
        async with self._slots.slot(key):
            end = asyncio.Event()
            self._ends.append((key, end))
            self.open.append(key)
            await end.wait()
            self.open.remove(key)


async def test_a_deployment_has_its_share_at_most() -> None:
    calls = Calls(CallSlots(total=10, per_deployment=3))
    await calls.start(BUSY, 8)
    assert calls.open == [BUSY] * 3
    await calls.start(OTHER)
    assert calls.open.count(OTHER) == 1


async def test_a_freed_slot_goes_to_the_deployment_that_holds_the_fewest() -> None:
    calls = Calls(CallSlots(total=4, per_deployment=4))
    await calls.start(BUSY, 20)
    await calls.start(OTHER, 2)
    assert calls.open == [BUSY] * 4
    await calls.end_one(BUSY)
    assert calls.open.count(OTHER) == 1
    await calls.end_one(BUSY)
    assert calls.open.count(OTHER) == 2
    await calls.end_one(OTHER)
    assert (calls.open.count(BUSY), calls.open.count(OTHER)) == (3, 1)


async def test_cancelled_calls_leave_neither_slots_nor_waiters() -> None:
    slots = CallSlots(total=2, per_deployment=2)
    calls = Calls(slots)
    await calls.start(BUSY, 5)
    for task in calls.tasks[:4]:
        task.cancel()
    await calls.settle()
    assert slots.held(BUSY) == 1
    calls.tasks[4].cancel()
    await calls.settle()
    assert slots.held(BUSY) == 0
    await calls.start(OTHER, 2)
    assert slots.held(OTHER) == 2


async def test_a_slot_that_is_granted_to_a_call_being_cancelled_is_returned() -> None:
    slots = CallSlots(total=1, per_deployment=1)
    calls = Calls(slots)
    await calls.start(BUSY)
    await calls.start(OTHER)
    calls._ends[0][1].set()
    await asyncio.sleep(0)  # BUSY releases its slot and grants it to OTHER, whose task has not run yet
    assert slots.held(OTHER) == 1
    calls.tasks[1].cancel()
    await calls.settle()
    assert (slots.held(BUSY), slots.held(OTHER)) == (0, 0)
    await calls.start(BUSY)
    assert slots.held(BUSY) == 1
