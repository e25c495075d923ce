"""Tests of admission: bounds, deadlines, cancellation, held requests, and limits of tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_router.queueing.admission import Admission, Place
from specdecode_router.queueing.refusals import NO_WORKER_RETRY_SECONDS, RefusalReason, Refused
from specdecode_router.queueing.tenants import Tenant
from specdecode_router.settings import RouterSettings
from support.virtual_loop import VirtualLoop, run_virtual

A, B = Tenant("a"), Tenant("b")
BATCH = 1


def admission(places: int, **limits: float) -> Admission:
    created = Admission(RouterSettings(**limits), asyncio.get_running_loop().time)  # type: ignore[arg-type]
    created.set_capacity(places)
    return created


def start(queue: Admission, tenant: Tenant = A, deadline: float | None = None) -> asyncio.Task[Place]:
    return asyncio.ensure_future(queue.acquire(tenant, deadline))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def refusal(awaitable: Awaitable[Place]) -> Refused:
    with pytest.raises(Refused) as raised:
        await awaitable
    return raised.value


def virtual(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run an asynchronous test on a loop with virtual time."""

    def run() -> None:
        run_virtual(test())  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@virtual
async def test_places_are_never_exceeded_and_pass_to_the_next_request() -> None:
    queue = admission(2)
    first, second, third = (start(queue) for _ in range(3))
    await settle()
    assert (first.done(), second.done(), third.done()) == (True, True, False)
    assert (queue.running, queue.waiting, queue.held) == (2, 1, 0)
    await asyncio.sleep(4)
    first.result().release()
    first.result().release()  # a second call does nothing
    place = await third
    assert place.waited_seconds == pytest.approx(4)
    assert (queue.running, queue.waiting) == (2, 0)
    with place, second.result():
        pass
    assert queue.running == 0


@virtual
async def test_the_full_queue_refuses_with_429_and_the_observed_rate() -> None:
    queue = admission(1, max_waiting=10)
    place = await queue.acquire(A, None)
    tasks = [start(queue) for _ in range(10)]
    await settle()
    for _ in range(5):  # one request leaves every two seconds
        await asyncio.sleep(2)
        place.release()
        place = await tasks.pop(0)
        tasks.append(start(queue))
        await settle()
    error = await refusal(queue.acquire(A, None))
    assert (error.status, error.reason, error.code) == (429, RefusalReason.queue_full, "rate_limit_exceeded")
    assert error.body()["error"]["type"] == "rate_limit_error"
    assert 18 <= int(error.headers["Retry-After"]) <= 22
    assert queue.waiting == 10


@virtual
async def test_a_tenant_has_a_bound_of_its_own_and_others_may_still_wait() -> None:
    queue = admission(1, max_waiting_per_tenant=3)
    await queue.acquire(A, None)
    tasks = [start(queue) for _ in range(3)]
    await settle()
    assert (await refusal(queue.acquire(A, None))).reason is RefusalReason.tenant_full
    tasks.append(start(queue, B))
    await settle()
    assert queue.waiting == 4


@virtual
async def test_a_tenant_that_fills_the_queue_makes_room_for_others() -> None:
    queue = admission(1, max_waiting=4)
    await queue.acquire(A, None)
    flood = [start(queue, replace(A, priority=BATCH)), *(start(queue) for _ in range(3))]
    await settle()
    few = [start(queue, B) for _ in range(2)]
    await settle()
    assert [task.done() for task in (*flood, *few)] == [True, False, False, True, False, False]
    assert (await refusal(flood[3])).reason is RefusalReason.queue_full
    assert queue.waiting == 4
    for tenant in (A, B):  # both have two waiting requests now
        assert (await refusal(queue.acquire(tenant, None))).status == 429


@virtual
async def test_held_requests_of_one_tenant_make_room_for_others() -> None:
    queue = admission(0, max_held=3)
    flood = [start(queue) for _ in range(3)]
    await settle()
    other = start(queue, B)
    await settle()
    error = await refusal(flood[2])
    assert (error.status, error.reason) == (503, RefusalReason.held_full)
    assert not other.done()
    assert queue.held == 3


@virtual
async def test_clients_without_authentication_share_the_whole_queue() -> None:
    queue = admission(1, max_waiting_per_tenant=3, max_waiting=8)
    tasks = [start(queue, Tenant("")) for _ in range(9)]
    await settle()
    assert queue.waiting == 8
    assert (await refusal(queue.acquire(Tenant(""), None))).reason is RefusalReason.queue_full
    assert len(tasks) == 9


@virtual
async def test_bodies_of_waiting_requests_have_a_bound_and_a_tenant_has_a_quarter_of_it() -> None:
    queue = admission(1, max_waiting_bytes=400)
    place = await queue.acquire(A, None)
    first = asyncio.create_task(queue.acquire(A, None, 0, 100))
    await settle()
    assert (await refusal(queue.acquire(A, None, 0, 1))).reason is RefusalReason.tenant_full
    others = [asyncio.create_task(queue.acquire(Tenant(""), None, 0, 150)) for _ in range(2)]
    await settle()
    assert (await refusal(queue.acquire(B, None, 0, 1))).reason is RefusalReason.queue_full
    place.release()
    await first
    again = asyncio.create_task(queue.acquire(A, None, 0, 100))
    await settle()
    assert [task.done() for task in (*others, again)] == [False] * 3
    others[0].cancel()
    await settle()
    few = [asyncio.create_task(queue.acquire(B, None, 0, size)) for size in (99, 1)]
    await settle()
    assert queue.waiting == 4
    assert not any(task.done() for task in few)


@virtual
async def test_a_deadline_ends_the_wait_with_504() -> None:
    queue = admission(1)
    await queue.acquire(A, None)
    began = asyncio.get_running_loop().time()
    error = await refusal(queue.acquire(A, 3.0))
    assert (error.status, error.reason) == (504, RefusalReason.deadline)
    assert asyncio.get_running_loop().time() - began == pytest.approx(3)
    assert error.headers["X-Should-Retry"] == "false"
    assert queue.waiting == 0
    assert (await refusal(queue.acquire(A, 0.0))).status == 504


@virtual
async def test_requests_are_held_without_a_worker_and_run_in_order_when_one_comes() -> None:
    queue = admission(0)
    changes: list[int] = []
    queue.on_held_change = lambda: changes.append(queue.held)
    tasks = [start(queue) for _ in range(3)]
    batch, urgent = start(queue, replace(B, priority=BATCH)), start(queue, B)
    await asyncio.sleep(100)
    assert (queue.held, queue.waiting, queue.running) == (5, 0, 0)
    assert queue.oldest_held_seconds == pytest.approx(100)
    queue.set_capacity(2)
    await settle()
    assert [task.done() for task in (*tasks, urgent, batch)] == [True, False, False, True, False]
    assert (queue.held, queue.waiting, queue.oldest_held_seconds) == (0, 3, 0)
    assert changes == [1, 2, 3, 4, 5, 0]
    queue.set_capacity(5)
    await settle()
    assert all(task.done() for task in tasks)
    await asyncio.sleep(1000)  # no timer of the wait is left to end a running request
    assert queue.running == 5


@virtual
async def test_a_held_request_gets_503_after_the_hold_time() -> None:
    queue = admission(0, hold_seconds=60)
    assert (await refusal(queue.acquire(A, 5.0))).reason is RefusalReason.deadline, "the deadline is its own"
    error = await refusal(queue.acquire(A, None))
    assert asyncio.get_running_loop().time() == pytest.approx(65)
    assert (error.status, error.reason) == (503, RefusalReason.hold_timeout)
    assert error.headers["Retry-After"] == str(NO_WORKER_RETRY_SECONDS)


@virtual
async def test_the_hold_time_counts_from_the_loss_of_the_last_worker() -> None:
    queue = admission(1, hold_seconds=60)
    await queue.acquire(A, None)
    task = start(queue)
    await asyncio.sleep(100)  # longer than the hold time, but there is a worker
    assert not task.done()
    queue.set_capacity(0)
    assert queue.held == 1
    await asyncio.sleep(59)
    queue.set_capacity(1)  # the first request still runs, so the second goes on waiting
    await asyncio.sleep(100)
    assert not task.done()
    queue.set_capacity(0)
    await refusal(task)
    assert asyncio.get_running_loop().time() == pytest.approx(319)


@virtual
async def test_a_full_queue_of_limited_tenants_refuses_no_request_that_a_place_is_free_for() -> None:
    queue = admission(4, max_waiting=2)
    tasks = [start(queue, Tenant("a", max_in_flight=1)) for _ in range(3)]
    await settle()
    assert queue.waiting == 2
    assert (await queue.acquire(B, None)).waited_seconds == 0
    assert len(tasks) == 3


@virtual
async def test_a_raised_limit_of_a_tenant_applies_to_its_waiting_requests_first() -> None:
    queue = admission(8)
    tasks = [start(queue, Tenant("a", max_in_flight=1)) for _ in range(2)]
    await settle()
    for limit, running in ((2, 2), (None, 4)):
        tasks.append(start(queue, Tenant("a", max_in_flight=limit)))
        await settle()
        assert [task.done() for task in tasks] == [True] * running + [False] * (len(tasks) - running)
    assert (queue.running, queue.waiting) == (4, 0)


# --- any order of events ----------------------------------------------------------------------------------------------

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
                self.tasks.append((tenant, start(self.queue, tenant, deadline)))
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
        await settle()
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
    """No place is lost or given twice, and none stays free in vain."""

    async def main() -> None:
        driver = Driver()
        for event in events:
            before = driver.queue.running
            await driver.apply(*event)
            assert driver.queue.running <= max(before, driver.capacity)
        await driver.finish()

    run_virtual(main())
