"""Homes of drafts: requests of tasks with a draft of their own meet at few workers, the others elsewhere."""

from __future__ import annotations

import random
from collections.abc import Sequence

from specdecode_router.placement.draft_homes import MIN_REQUESTS, DraftHomes, plan_tasks_of
from specdecode_router.workers.worker import Endpoint, WorkerView
from specdecode_worker.contract.internal_stream import PlanTask

CODE, CHAT = PlanTask("code", "```", "coder"), PlanTask("chat")


def workers(count: int, *tasks: PlanTask) -> list[WorkerView]:
    return [WorkerView(Endpoint(f"w{index}", ""), 0, plan_tasks=tasks or (CODE, CHAT)) for index in range(count)]


def homes_after(share: float, views: Sequence[WorkerView], requests: int = 1000) -> set[str]:
    homes, draws = DraftHomes(), random.Random(1)
    for _ in range(requests):
        homes.record("coder" if draws.random() < share else "")
    return names(homes.assign(views))


def names(views: Sequence[WorkerView]) -> set[str]:
    return {view.endpoint.name for view in views if view.tasks}


def test_the_number_of_homes_follows_the_share_of_the_draft() -> None:
    assert [len(homes_after(share, workers(8))) for share in (0.02, 0.25, 0.5, 1.0)] == [0, 2, 4, 8]


def test_a_worker_without_the_draft_is_no_home() -> None:
    lacking = [WorkerView(Endpoint(f"lacking{index}", ""), 0, plan_tasks=(PlanTask("code", "```"), CHAT))
               for index in range(4)]  # fmt: skip
    assert homes_after(1.0, [*workers(2), *lacking]) == {"w0", "w1"}
    assert homes_after(1.0, workers(4, CHAT)) == set()


def test_a_home_has_the_tasks_of_its_draft_alone() -> None:
    homes = DraftHomes()
    for number in range(100):
        homes.record("coder" if number % 4 == 0 else "")
    (home,) = [view for view in homes.assign(workers(4)) if view.tasks]
    assert home.tasks == {"code"}


def test_few_requests_give_no_homes() -> None:
    assert homes_after(1.0, workers(4), MIN_REQUESTS - 1) == set()


def test_homes_do_not_flap_around_a_boundary() -> None:
    homes, draws, seen = DraftHomes(), random.Random(3), set()
    views = workers(4)
    for number in range(4000):
        homes.record("coder" if draws.random() < 0.375 else "")
        if number > 400:
            seen.add(len(names(homes.assign(views))))
    assert len(seen) <= 2
    changes = 0
    last = names(homes.assign(views))
    for _ in range(4000):
        homes.record("coder" if draws.random() < 0.375 else "")
        if (now := names(homes.assign(views))) != last:
            changes, last = changes + 1, now
    assert changes <= 4, "40 times the memory of the counts"


def test_a_worker_that_joins_takes_homes_only_for_itself() -> None:
    homes = DraftHomes()
    for number in range(1000):
        homes.record("coder" if number % 2 else "")
    before = names(homes.assign(workers(4)))
    after = names(homes.assign(workers(5)))
    assert after - before <= {"w4"}


def test_tasks_come_from_the_first_worker_that_reports_some() -> None:
    assert plan_tasks_of([WorkerView(Endpoint("new", ""), 0), *workers(1)]) == (CODE, CHAT)
    assert plan_tasks_of([]) == ()
