"""Tests of calls that several callers share."""

from __future__ import annotations

import asyncio

import pytest

from specdecode_worker.server.service import SharedCall


class Counter:
    """Call that returns how often it was called; it fails from the call number ``fails_from`` on."""

    def __init__(self, fails_from: int = 100) -> None:
        self.calls = 0
        self._fails_from = fails_from

    async def __call__(self) -> int:
        self.calls += 1
        await asyncio.sleep(0.01)
        if self.calls >= self._fails_from:
            raise ValueError("planted")
        return self.calls


async def test_callers_at_the_same_time_share_one_call() -> None:
    counter = Counter()
    shared = SharedCall(counter, interval_seconds=0.05)
    assert await asyncio.gather(*(shared.result() for _ in range(10))) == [1] * 10


async def test_caller_during_a_call_gets_the_next_one() -> None:
    counter = Counter()
    shared = SharedCall(counter, interval_seconds=0.05)
    first = asyncio.create_task(shared.result())
    await asyncio.sleep(0.005)
    assert counter.calls == 1
    assert (await shared.result(), await first) == (2, 1)


async def test_tight_loops_cause_one_call_per_interval() -> None:
    counter = Counter()
    shared = SharedCall(counter, interval_seconds=0.1)

    async def loop() -> None:
        while True:
            await shared.result()

    loops = [asyncio.create_task(loop()) for _ in range(4)]
    await asyncio.sleep(0.55)
    for one in loops:
        one.cancel()
    assert 2 <= counter.calls <= 6


async def test_error_reaches_every_caller_and_the_next_call_is_made() -> None:
    shared = SharedCall(Counter(fails_from=1), interval_seconds=0.01)
    results = await asyncio.gather(*(shared.result() for _ in range(3)), return_exceptions=True)
    assert [str(one) for one in results] == ["planted"] * 3
    with pytest.raises(ValueError, match="planted"):
        await shared.result()


async def test_cancelled_caller_does_not_cancel_the_others() -> None:
    shared = SharedCall(Counter(), interval_seconds=0.01)
    first, second = asyncio.create_task(shared.result()), asyncio.create_task(shared.result())
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1
