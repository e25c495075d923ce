"""Property of admission under any order of events: no place is lost or given twice, and none stays free in vain."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_router.queueing.admission import Admission, Place
from specdecode_router.queueing.refusals import Refused
from specdecode_router.queueing.tenants import Tenant
from specdecode_router.settings import RouterSettings
from support.virtual_loop import VirtualLoop, run_virtual

TENANTS = (Tenant("a"), Tenant("b", weight=3), Tenant("c", max_in_flight=1), Tenant("d", priority=1, max_in_flight=2))
LIMITS = RouterSettings(max_waiting=8, max_waiting_per_tenant=4, max_held=6, hold_seconds=20)

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 3), st.sampled_from([None, 0.0, 2.0, 30.0])),
        st.tuples(st.just("release"), st.integers(0, 20), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 20), st.none()),
        st.tuples(st.just("capacity"), st.sampled_from([0, 0, 1, 2, 5]), st.none()),
        st.tuples(st.just("settle"), st.just(0), st.none()),
        st.tuples(st.just("sleep"), st.integers(0, 25), st.none()),
    ),
    max_size=50,
)


class Driver:
    """Requests on one queue, and the facts about them that must hold at rest."""

    def __init__(self) -> None:
        self.queue = Admission(LIMITS, asyncio.get_running_loop().time)
        self.capacity = 0
        self.tasks: list[tuple[Tenant, asyncio.Task[Place]]] = []
        self.released: set[asyncio.Task[Place]] = set()

    async def apply(self, event: str, number: int, deadline: float | None) -> None:
        chosen = self.tasks[number % len(self.tasks)][1] if self.tasks else None
        match event:
            case "arrive":
                tenant = TENANTS[number]
                self.tasks.append((tenant, asyncio.ensure_future(self.queue.acquire(tenant, deadline))))
            case "capacity":
                self.capacity = number
                self.queue.set_capacity(number)
            case "release" if chosen and self.has_place(chosen):
                self.released.add(chosen)
                chosen.result().release()
            case "cancel" if chosen:
                chosen.cancel()
            case "settle" | "sleep":
                await self.rest(number)

    async def rest(self, seconds: float = 0) -> None:
        await asyncio.sleep(seconds)
        for _ in range(5):
            await asyncio.sleep(0)
        self.check()

    def has_place(self, task: asyncio.Task[Place]) -> bool:
        return task.done() and not task.cancelled() and task.exception() is None and task not in self.released

    def check(self) -> None:
        running = [tenant for tenant, task in self.tasks if self.has_place(task)]
        waiting = [tenant for tenant, task in self.tasks if not task.done()]
        assert self.queue.running == len(running)
        assert (self.queue.waiting, self.queue.held) == ((len(waiting), 0) if self.capacity else (0, len(waiting)))
        for tenant in TENANTS:
            assert tenant.max_in_flight is None or running.count(tenant) <= tenant.max_in_flight
            assert waiting.count(tenant) <= LIMITS.max_waiting_per_tenant
        if self.queue.running < self.capacity:
            assert all(running.count(tenant) == tenant.max_in_flight for tenant in waiting)
        for _, task in self.tasks:
            assert not task.done() or task.cancelled() or isinstance(task.exception(), Refused | None)

    async def finish(self) -> None:
        """Release every place until all have left."""
        await self.apply("capacity", 3, None)
        await self.rest()
        while any(self.has_place(task) for _, task in self.tasks):
            for number in range(len(self.tasks)):
                await self.apply("release", number, None)
            await self.rest()
        assert all(task.done() for _, task in self.tasks)
        assert (self.queue.running, self.queue.waiting, self.queue.held) == (0, 0, 0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        assert loop.timers() == 0


@settings(max_examples=300, deadline=None)
@given(events=EVENTS)
def test_places_are_conserved(events: list[tuple[str, int, float | None]]) -> None:
    async def main() -> None:
        driver = Driver()
        for event in events:
            before = driver.queue.running
            await driver.apply(*event)
            assert driver.queue.running <= max(before, driver.capacity)
        await driver.finish()

    run_virtual(main())
