"""Differences of counters: readings that can be subtracted, and the sum over the fleet."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_operator.planning.estimates import Load, features
from specdecode_operator.telemetry.counters import CellKey, Delta, Hits, difference, fleet, over, regression
from specdecode_worker.contract import Buckets, ContextCell, Plan, PlanState, Report
from support.operators.estimates import moments
from support.operators.fleet import SimulatedWorker, Truth

BUCKETS = Buckets()


def readings(**change: Any) -> tuple[Report, Report]:
    worker = SimulatedWorker(Truth(sequences=2, waiting=3), plan=Plan(max_depth=5))
    worker.run(4)
    before = worker.report()
    worker.run(5)
    return before, worker.report().model_copy(update=change)


def test_a_difference_has_the_counts_between_two_readings() -> None:
    before, after = readings()
    result = difference(before, after, at=100, buckets=BUCKETS)
    assert result.seconds == pytest.approx(after.clock_seconds - before.clock_seconds)
    assert result.drafts == after.drafts - before.drafts
    assert (result.running, result.waiting) == (pytest.approx(2), pytest.approx(3))
    assert sum(moments.count for moments in result.steps.values()) == sum(c.count for c in after.steps) - sum(
        c.count for c in before.steps
    )
    assert result.acceptance[("other", 1)].total == sum(after.acceptance[0].ranks) - sum(before.acceptance[0].ranks)


@pytest.mark.parametrize(
    "change", [{"boot_id": "another"}, {"clock_seconds": 0.0}, {"drafts": 0}, {"running_request_seconds": 0.0}], ids=str
)
def test_readings_that_cannot_be_subtracted(change: dict[str, Any]) -> None:
    before, after = readings(**change)
    assert difference(before, after, at=100, buckets=BUCKETS) is None


def test_cells_of_other_context_edges_are_left_out() -> None:
    before, after = readings(plan=PlanState(buckets=Buckets(context=(99,))))
    result = difference(before, after, at=100, buckets=BUCKETS)
    assert result.steps == {}
    assert result.drafts > 0


def test_first_tokens_by_context_are_of_the_running_draft_and_of_the_same_edges() -> None:
    before, after = readings()
    cell = ContextCell(draft=after.draft.hash, task="other", context=2, total=10, hits=4)
    before = before.model_copy(update={"contexts": (cell,)})
    rest = (cell.model_copy(update={"total": 30, "hits": 9}), cell.model_copy(update={"draft": "gone"}))
    after = after.model_copy(update={"contexts": rest})
    result = difference(before, after, at=100, buckets=BUCKETS)
    assert result.contexts == {("other", 2): Hits(5, 20)}
    other = difference(before, after, at=100, buckets=Buckets(context=(7,)))
    assert other.contexts == {}


@pytest.mark.parametrize(("share", "is_counted"), [(0.5, True), (1.5, False)], ids=["new", "left out before"])
def test_a_kind_of_step_that_a_reading_left_out_is_not_counted_from_zero(share: float, is_counted: bool) -> None:
    before, after = readings()
    passed = after.clock_seconds - before.clock_seconds
    cell = after.steps[0].model_copy(update={"wall_seconds": share * passed})
    without = before.model_copy(update={"steps": ()})
    result = difference(without, after.model_copy(update={"steps": (cell,)}), at=100, buckets=BUCKETS)
    assert bool(result.steps) == is_counted


def test_a_cell_of_acceptance_that_a_reading_left_out_is_not_counted_from_zero() -> None:
    before, after = readings()
    first = after.acceptance[0]
    old = first.model_copy(update={"ranks": tuple(1000 * count for count in first.ranks)})
    without = before.model_copy(update={"acceptance": ()})
    new = difference(without, after.model_copy(update={"acceptance": (first,)}), at=100, buckets=BUCKETS)
    assert new.acceptance["other", 1].total == first.total
    found = difference(without, after.model_copy(update={"acceptance": (old,)}), at=100, buckets=BUCKETS)
    assert found.acceptance == {}


def test_acceptance_of_another_draft_is_no_evidence() -> None:
    before, after = readings()
    other = tuple(cell.model_copy(update={"draft": "old"}) for cell in after.acceptance)
    result = difference(before, after.model_copy(update={"acceptance": other}), at=1, buckets=BUCKETS)
    assert result.acceptance == {}


def delta(draft: str = "d", **fields: Any) -> Delta:
    return Delta(**{"draft": draft, "seconds": 5.0, "running": 2.0, "drafts": 10, **fields})


def test_the_fleet_adds_workers_and_leaves_other_drafts_out() -> None:
    mine = delta(acceptance={("other", 1): Hits(3, 5)})
    result = fleet([mine, mine, delta("canary", drafts=99)], at=7, draft="d")
    assert (result.at, result.drafts, result.running, result.seconds) == (7, 20, 6, 5)
    assert result.acceptance[("other", 1)] == Hits(6, 10)


def test_steps_of_workers_without_a_draft_are_those_of_the_fleet() -> None:
    """After a change to method none, or where the draft cannot be loaded. A trial has none of its own either."""
    steps = {CellKey(4, 0, False, 0): moments(features(Load(4, 500), 0), 0.03)}
    plain, trial = delta("", drafts=0, steps=steps), delta(steps=steps).load_only()
    result = fleet([plain, trial], at=7, draft="d")
    assert (result.steps, result.drafts, result.running) == (steps, 0, 4)


def test_a_window_averages_load_over_time() -> None:
    result = over([delta(running=1.0, seconds=1.0), delta(running=4.0, seconds=3.0)])
    assert (result.running, result.seconds, result.drafts) == (pytest.approx(3.25), 4, 20)
    assert over([]).seconds == 0


@pytest.mark.parametrize("counter", ["drafts", "running_request_seconds", "clock_seconds"])
def test_a_report_with_a_counter_that_fell_within_one_boot_is_named(counter: str) -> None:
    before, after = readings()
    assert regression(before, after) is None
    assert regression(None, after) is None
    fallen = after.model_copy(update={counter: type(getattr(after, counter))(1)})
    problem = regression(before, fallen)
    assert problem.startswith(f"{counter}: fell from ")
    restarted = fallen.model_copy(update={"boot_id": "another"})
    assert regression(before, restarted) is None, "counters start at zero after a restart"
