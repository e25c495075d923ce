"""One run per key at a time, coalesced events, back-off, resync; with a clock that the test turns."""

from __future__ import annotations

import asyncio

import pytest

from specdecode_operator.controller.workqueue import QueueTimes, Schedule, WorkQueue

A, B = ("ns", "a"), ("ns", "b")
PACE = QueueTimes(debounce=0.2, first_retry=1, last_retry=60)


@pytest.fixture
def schedule() -> Schedule:
    return Schedule(PACE)


def test_a_key_does_not_run_twice_at_a_time(schedule: Schedule) -> None:
    schedule.add(A, 0)
    assert schedule.take(0) == A
    schedule.add(A, 0.1)
    assert schedule.take(0.1) is None
    schedule.done(A, 0.5, again_in=5)
    assert schedule.take(0.6) is None, "two runs in a row need the debounce between them"
    assert schedule.take(0.71) == A, "an event during the run must cause one more"


def test_many_events_become_one_run(schedule: Schedule) -> None:
    for _ in range(10):
        schedule.add(A, 0)
    assert schedule.take(0) == A
    schedule.done(A, 0.1, again_in=5)
    assert schedule.take(1) is None


def test_a_resync_needs_no_event(schedule: Schedule) -> None:
    schedule.add(A, 0)
    schedule.take(0)
    schedule.done(A, 1, again_in=5)
    due = schedule.next_due()
    assert due is not None
    assert 3.5 <= due <= 8.5
    for _ in range(3):
        assert schedule.take(due - 0.1) is None
        assert schedule.take(due) == A
        schedule.done(A, due + 0.5, again_in=5)
        assert schedule.next_due() == pytest.approx(due + 5)
        due += 5


def test_resyncs_of_keys_that_started_together_are_spread(schedule: Schedule) -> None:
    keys = [("ns", f"d{index}") for index in range(600)]
    for key in keys:
        schedule.add(key, 0)
        schedule.take(0)
        schedule.done(key, 0, again_in=60)
    taken: list[tuple[str, str]] = []
    for now in range(91):
        before = len(taken)
        while (key := schedule.take(now)) is not None:
            taken.append(key)
        assert len(taken) - before < 30, "ten a second"
    assert sorted(taken) == sorted(keys)


def test_an_event_goes_before_late_resyncs_within_its_head_start(schedule: Schedule) -> None:
    schedule.add(A, 0)
    schedule.take(0)
    schedule.done(A, 0, again_in=10)
    due = schedule.next_due()
    assert due is not None
    schedule.add(B, due + 10)
    assert schedule.take(due + 10) == B
    schedule.done(B, due + 10, again_in=None)
    schedule.add(B, due + PACE.head_start + 1)
    assert schedule.take(due + PACE.head_start + 1) == A


def test_changes_by_users_go_before_other_events(schedule: Schedule) -> None:
    schedule.add(A, 0)
    schedule.add(B, 10, changed=True)
    schedule.add(B, 10)
    assert schedule.take(10) == B, "a later event of a child does not reduce the head start"
    assert schedule.take(10) == A


def test_failures_back_off_and_success_forgets_them(schedule: Schedule) -> None:
    now, waits = 0.0, []
    schedule.add(A, now)
    for _ in range(8):
        assert schedule.take(now) == A
        waits.append(schedule.failed(A, now))
        now += waits[-1]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    schedule.take(now)
    schedule.done(A, now, again_in=0)
    schedule.take(now + 1)
    assert schedule.failed(A, now + 1) == 1


def test_an_event_during_a_failing_run_waits_for_the_first_back_off(schedule: Schedule) -> None:
    schedule.add(A, 0)
    for now in range(0, 100, 10):
        assert schedule.take(now) == A
        schedule.add(A, now)
        assert schedule.failed(A, now) == 1


def test_the_key_of_a_deleted_object_is_forgotten(schedule: Schedule) -> None:
    schedule.add(A, 0)
    schedule.take(0)
    schedule.done(A, 1, again_in=None)
    assert schedule.next_due() is None


def test_the_longest_due_goes_first(schedule: Schedule) -> None:
    schedule.add(B, 1)
    schedule.add(A, 2)
    assert [schedule.take(3), schedule.take(3)] == [B, A]


async def test_a_queue_stops_when_cancelled_during_an_event() -> None:
    async def handle(key: tuple[str, str]) -> float | None:
        return 100.0

    for _ in range(50):
        queue = WorkQueue(handle)
        task = asyncio.create_task(queue.run())
        queue.add(A)
        await asyncio.sleep(0.001)
        queue.add(B)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=1)
        assert task.done()


async def test_different_keys_run_concurrently_and_one_key_does_not() -> None:
    running: set[tuple[str, str]] = set()
    most, runs = 0, 0

    async def handle(key: tuple[str, str]) -> float | None:
        nonlocal most, runs
        assert key not in running, "one reconcile per key at a time"
        running.add(key)
        most, runs = max(most, len(running)), runs + 1
        await asyncio.sleep(0.02)
        running.discard(key)
        if runs % 3 == 0:
            raise RuntimeError("now and then it fails")
        return 0.01

    queue = WorkQueue(handle, concurrency=2, times=QueueTimes(debounce=0.001, first_retry=0.01))
    task = asyncio.create_task(queue.run())
    for name in ("a", "b", "c"):
        queue.add(("ns", name))
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert most == 2
    assert runs > 12
