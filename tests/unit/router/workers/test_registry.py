"""Table of workers: state by name, avoidance after failures, capacity, and notice of changes."""

from __future__ import annotations

import asyncio

from specdecode_router.workers.registry import WorkerRegistry
from specdecode_router.workers.worker import Endpoint
from specdecode_worker.contract.internal_stream import WorkerLoad
from support.clock import Clock

A, B = Endpoint("a", "http://a"), Endpoint("b", "http://b")


def registry_of(*endpoints: Endpoint) -> tuple[WorkerRegistry, Clock]:
    clock = Clock(100.0)
    registry = WorkerRegistry(clock, cooldown_seconds=1.0)
    registry.update(endpoints)
    return registry, clock


def report(
    registry: WorkerRegistry,
    name: str,
    places: int = 8,
    *,
    key: str = "",
    routers: tuple[str, ...] = (),
    settled: bool = True,
    clients: dict[str, int] | None = None,
) -> None:
    clients = {"": 3} if clients is None else clients
    load = WorkerLoad(routers=routers, settled=settled, clients=clients, max_num_seqs=places, draining=False,
                      compatibility_key=key, model="")  # fmt: skip
    registry.record_load(name, load)


def suspects(registry: WorkerRegistry) -> list[str]:
    return [view.endpoint.name for view in registry.views() if view.suspect]


def test_a_worker_that_stays_keeps_its_state() -> None:
    registry, _ = registry_of(A)
    registry.begin_stream("a", "t")
    report(registry, "a", key="k")
    registry.update([B, Endpoint("a", "http://other")])
    b, a = registry.views()
    assert (a.endpoint.admin_url, a.in_flight, a.requests, a.compatibility_key) == ("http://other", 1, 3, "k")
    assert b.in_flight == 0
    registry.update([B])
    registry.end_stream("a", "t")
    assert [view.endpoint.name for view in registry.views()] == ["b"]


def test_streams_of_a_worker_that_leaves_and_returns_count_on() -> None:
    registry, _ = registry_of(A, B)
    registry.begin_stream("a", "t")
    registry.record_silence("a")
    registry.update([B])
    registry.update([A, B])
    assert (registry.views()[0].in_flight, suspects(registry)) == (1, ["a"])
    registry.begin_stream("a", "t")
    registry.end_silence("a")
    registry.end_stream("a", "t")
    assert (registry.views()[0].in_flight, suspects(registry)) == (1, [])


def test_failures_double_the_cooldown_until_an_answer() -> None:
    registry, clock = registry_of(A, B)
    registry.record_failure("a")
    assert suspects(registry) == ["a"]
    clock.now += 1.1
    assert suspects(registry) == []
    registry.record_failure("a")
    clock.now += 1.1
    assert suspects(registry) == ["a"]
    report(registry, "a")
    assert suspects(registry) == []


def test_a_lost_worker_has_no_capacity_until_it_answers() -> None:
    registry, _ = registry_of(A, B)
    report(registry, "a")
    report(registry, "b")
    assert registry.capacity == 20
    calls: list[int] = []
    registry.on_change = lambda: calls.append(registry.capacity)
    for _ in range(3):
        registry.record_failure("a")
    assert calls == [10]
    assert [view.endpoint.name for view in registry.views()] == ["b"]
    assert (registry.counts()["ready"], registry.counts()["suspect"]) == (1, 1)
    report(registry, "a")
    assert calls == [10, 20]


def test_draining_and_terminating_workers_get_nothing_new() -> None:
    registry, _ = registry_of(A, B, Endpoint("c", "http://c", terminating=True))
    registry.record_draining("a")
    assert [view.endpoint.name for view in registry.views()] == ["b"]
    assert registry.counts()["terminating"] == 2
    report(registry, "a")
    assert len(registry.views()) == 2, "it came back under its name"


def test_silent_streams() -> None:
    registry, _ = registry_of(A)
    registry.record_silence("a")
    registry.record_silence("a")
    registry.end_silence("a")
    assert suspects(registry) == ["a"]
    registry.end_silence("a")
    assert suspects(registry) == []


async def test_waiting_ends_when_a_worker_appears() -> None:
    registry, _ = registry_of()
    waiting = asyncio.create_task(registry.wait_for_change(5))
    await asyncio.sleep(0)
    registry.update([A])
    await asyncio.wait_for(waiting, 1)
    await registry.wait_for_change(0.01)


def shared(count: int, rank: int) -> WorkerRegistry:
    """Return the registry of one of ``count`` routers over two workers."""
    registry = WorkerRegistry(Clock(100.0), 1.0, f"r{rank}", wall_clock=lambda: 0.0)
    registry.update([A, B])
    for name in "ab":
        report(registry, name, 4, routers=tuple(f"r{number}" for number in range(count)), clients={"t": 6})
    return registry


def test_routers_share_the_places_and_the_limits_of_tenants() -> None:
    routers = [shared(8, rank) for rank in range(8)]
    assert [one.capacity for one in routers] == [2, 2, 2, 2, 1, 1, 1, 1]
    assert sum(one.tenant_limit("t", 9) for one in routers) == 9
    assert shared(1, 0).capacity == 12
    assert shared(1, 0).tenant_limit("t", 9) == 9


def test_a_router_that_workers_do_not_list_yet_counts_itself() -> None:
    registry = WorkerRegistry(Clock(100.0), 1.0, "new")
    registry.update([A])
    report(registry, "a", 8, routers=("old",), clients={"": 10})
    assert registry.capacity == 5


def test_requests_on_a_trial_that_lost_its_share_take_no_places_of_other_workers() -> None:
    registry, _ = registry_of(A, Endpoint("b", "http://b", deployment="trial"))
    for name in "ab":
        report(registry, name, 8, clients={})
    places = registry.capacity // 2
    for _ in range(places):
        registry.begin_stream("b", "t")
    registry.has_share = lambda deployment: deployment != "trial"
    assert registry.capacity == 2 * places
    for _ in range(places):
        registry.end_stream("b", "t")
    assert registry.capacity == places


def test_free_rows_are_borrowed_and_given_back() -> None:
    registry = shared(2, 0)
    for name in "ab":
        for _ in range(2):
            report(registry, name, 4, routers=("r0", "r1"), clients={})
    assert (registry.capacity, registry.has_free_rows) == (6, True)
    for _ in range(3):
        registry.begin_stream("a", "t")
        registry.begin_stream("b", "t")
    for name in "ab":
        report(registry, name, 4, routers=("r0", "r1"), clients={"t": 3})
    assert registry.capacity == 7, "half of the two free rows"
    for name in "ab":
        report(registry, name, 4, routers=("r0", "r1"), clients={"t": 3, "other": 3})
    assert (registry.capacity, registry.has_free_rows) == (6, False)


def test_a_new_worker_is_a_small_one_until_it_knows_its_routers() -> None:
    registry, _ = registry_of(A)
    report(registry, "a", 64, settled=False)
    assert (registry.capacity, registry.is_settled("a"), registry.has_free_rows) == (2, False, False)
    report(registry, "a", 64)
    assert (registry.capacity, registry.is_settled("a")) == (80, True)


def test_the_other_routers_are_expected_to_do_the_same() -> None:
    registry = shared(8, 0)
    registry.begin_stream("a", "t")
    assert [view.requests for view in registry.views()] == [14, 6]
    registry.end_stream("a", "t")
    assert [view.requests for view in registry.views()] == [6, 6]
