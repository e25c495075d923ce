"""Table of workers: state by name, avoidance after failures, capacity, and notice of changes."""

from __future__ import annotations

import asyncio

from specdecode_router.workers.registry import WorkerRegistry
from specdecode_router.workers.worker import Endpoint

A, B = Endpoint("a", "http://a"), Endpoint("b", "http://b")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def registry_of(*endpoints: Endpoint) -> tuple[WorkerRegistry, Clock]:
    clock = Clock()
    registry = WorkerRegistry(clock, cooldown_seconds=1.0)
    registry.update(endpoints)
    return registry, clock


def report(registry: WorkerRegistry, name: str, places: int = 8, *, draining: bool = False, key: str = "") -> None:
    registry.record_report(name, requests=3, max_num_seqs=places, draining=draining, compatibility_key=key)


def suspects(registry: WorkerRegistry) -> list[str]:
    return [view.endpoint.name for view in registry.views() if view.suspect]


def test_a_worker_that_stays_keeps_its_state() -> None:
    registry, _ = registry_of(A)
    registry.begin_stream("a")
    report(registry, "a", key="k")
    registry.update([B, Endpoint("a", "http://other")])
    b, a = registry.views()
    assert (a.endpoint.admin_url, a.in_flight, a.reported_requests, a.compatibility_key) == ("http://other", 1, 3, "k")
    assert b.in_flight == 0
    registry.update([B])
    registry.end_stream("a")
    assert [view.endpoint.name for view in registry.views()] == ["b"]


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
    assert (registry.counts().ready, registry.counts().suspect) == (1, 1)
    report(registry, "a")
    assert calls == [10, 20]


def test_draining_and_terminating_workers_get_nothing_new() -> None:
    registry, _ = registry_of(A, B, Endpoint("c", "http://c", terminating=True))
    registry.record_draining("a")
    assert [view.endpoint.name for view in registry.views()] == ["b"]
    assert registry.counts().terminating == 2
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
