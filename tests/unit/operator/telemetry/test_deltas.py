"""Differences of counters: what may be subtracted, and what the fleet's sum is."""

from __future__ import annotations

from typing import Any

import pytest
from fleet import SimulatedWorker, Truth

from specdecode_operator.telemetry.counters import Hits
from specdecode_operator.telemetry.deltas import Delta, difference, fleet, over
from specdecode_worker.contract import Buckets, Plan, PlanState, Report

BUCKETS = Buckets()


def readings(**change: Any) -> tuple[Report, Report]:
    worker = SimulatedWorker(Truth(sequences=2, waiting=3), plan=Plan(max_depth=5))
    worker.run(4)
    before = worker.report()
    worker.run(5)
    return before, worker.report().model_copy(update=change)


def test_a_difference_is_what_happened_in_between() -> None:
    before, after = readings()
    found = difference(before, after, at=100, buckets=BUCKETS)
    assert found is not None
    assert found.seconds == pytest.approx(after.clock_seconds - before.clock_seconds)
    assert found.drafts == after.drafts - before.drafts
    assert (found.running, found.waiting) == (pytest.approx(2), pytest.approx(3))
    assert sum(moments.count for moments in found.steps.values()) == sum(c.count for c in after.steps) - sum(
        c.count for c in before.steps
    )
    assert found.acceptance[("other", 1)].total == sum(after.acceptance[0].ranks) - sum(before.acceptance[0].ranks)


@pytest.mark.parametrize(
    "change", [{"boot_id": "another"}, {"clock_seconds": 0.0}, {"drafts": 0}, {"running_request_seconds": 0.0}], ids=str
)
def test_what_cannot_be_subtracted(change: dict[str, Any]) -> None:
    before, after = readings(**change)
    assert difference(before, after, at=100, buckets=BUCKETS) is None


def test_cells_of_other_context_edges_mean_something_else() -> None:
    before, after = readings(plan=PlanState(buckets=Buckets(context=(99,))))
    found = difference(before, after, at=100, buckets=BUCKETS)
    assert found is not None
    assert found.steps == {}
    assert found.drafts > 0


def test_acceptance_of_another_draft_is_no_evidence() -> None:
    before, after = readings()
    other = tuple(cell.model_copy(update={"draft": "old"}) for cell in after.acceptance)
    found = difference(before, after.model_copy(update={"acceptance": other}), at=1, buckets=BUCKETS)
    assert found is not None
    assert found.acceptance == {}


def delta(draft: str = "d", **fields: Any) -> Delta:
    return Delta(**{"draft": draft, "seconds": 5.0, "running": 2.0, "drafts": 10, **fields})


def test_the_fleet_adds_workers_and_leaves_strangers_drafts_out() -> None:
    mine = delta(acceptance={("other", 1): Hits(3, 5)})
    found = fleet([mine, mine, delta("canary", drafts=99)], at=7, draft="d")
    assert (found.at, found.drafts, found.running, found.seconds) == (7, 20, 6, 5)
    assert found.acceptance[("other", 1)] == Hits(6, 10)


def test_a_window_averages_load_over_time() -> None:
    found = over([delta(running=1.0, seconds=1.0), delta(running=4.0, seconds=3.0)])
    assert (found.running, found.seconds, found.drafts) == (pytest.approx(3.25), 4, 20)
    assert over([]).seconds == 0
