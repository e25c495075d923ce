"""Calibration: steps are timed on synthetic requests, and only the step times remain afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_worker.contract import Plan
from specdecode_worker.engine.calibration import calibrate
from specdecode_worker.engine.engine import Engine
from support.worker.accounts import check_engine
from support.worker.small_engine import drain, plan_of, small_engine, submit


def calibrated(plan: Plan, **options: Any) -> tuple[Engine, dict[int, float]]:
    """Return an engine behind its calibration, and the seconds by load."""
    engine = small_engine(**{"max_num_seqs": 2, **options})
    engine.set_plan(plan)
    return engine, calibrate(engine, 60)


@pytest.mark.parametrize("pipelined", [False, True], ids=["direct", "pipelined"])
def test_every_load_is_timed_and_only_step_times_remain(pipelined: bool) -> None:
    engine, seconds_by_load = calibrated(plan_of("chain:3", guard=True), max_num_seqs=4, pipelined=pipelined)
    assert list(seconds_by_load) == [1, 2, 4]
    assert min(seconds_by_load.values()) > 0
    report = engine.report()
    assert engine.idle
    check_engine(engine)
    assert (report.traffic, report.acceptance, report.drafts, report.plain_steps) == ((), (), 0, 0)
    assert {cell.draft_passes for cell in report.steps} == {0}
    assert sum(cell.count for cell in report.steps) >= 3 * 5


def test_the_first_report_has_step_times_with_drafts() -> None:
    """The times are of the deepest and the shallowest chain at every load, without the steps of the warm-up."""
    plan = plan_of("chain:3", guard=True, max_depth=3, explore=0.01)
    engine, _ = calibrated(plan, max_num_seqs=4)
    report = engine.report()
    decoding = [cell for cell in report.steps if not cell.prefill]
    steps = {passes: sum(cell.count for cell in decoding if cell.draft_passes == passes) for passes in (0, 1, 3)}
    assert {cell.draft_passes for cell in decoding} == {0, 1, plan.max_depth}
    assert steps[0] == pytest.approx(3 * 13, abs=6)
    assert min(steps[1], steps[3]) >= 3 * 6
    assert {round(cell.x[1] / cell.count) for cell in decoding if cell.draft_passes == 3} == {1, 2, 4}
    assert (report.acceptance, report.drafts, report.accepted_tokens, report.requests) == ((), 0, 0, ())
    engine.add(submit("a", max_tokens=8))
    drain(engine)
    assert engine.report().drafts > 0, "the plan is followed again"


def test_a_wide_tree_is_timed_where_the_plan_allows_trees() -> None:
    engine, _ = calibrated(plan_of("chain:3", guard=True, max_depth=3, top_k=4, explore=0.01))
    decoding = [cell for cell in engine.report().steps if not cell.prefill]
    assert {cell.draft_passes for cell in decoding} == {0, 1, 2, 3}
    trees = [cell for cell in decoding if cell.draft_passes == 2]
    assert {cell.x[2] / cell.x[1] for cell in trees} == {1 + 8}, "four tokens, and one after each"


def test_shapes_are_not_timed_if_exploration_is_off() -> None:
    engine, _ = calibrated(plan_of("chain:3", guard=True, max_depth=3, explore=0))
    assert {cell.draft_passes for cell in engine.report().steps} == {0}


@pytest.mark.parametrize("max_model_len", [16, 24])
def test_a_model_with_a_short_context_is_calibrated(max_model_len: int) -> None:
    plan = plan_of("chain:3", guard=True, max_depth=3, explore=0.01)
    engine, seconds_by_load = calibrated(plan, max_model_len=max_model_len)
    assert list(seconds_by_load) == [1, 2]
    check_engine(engine)


def test_the_guard_starts_with_calibrated_plain_step_times() -> None:
    engine, seconds_by_load = calibrated(plan_of("chain:3", guard=True), max_num_seqs=4)
    engine.add(submit("a", max_tokens=4))  # ends before the guard could stop drafts and run plain steps itself
    drain(engine)
    cells = {cell.concurrency: cell for cell in engine.report().guard}
    assert cells[0].plain == pytest.approx(seconds_by_load[1])
    assert engine.report().drafts > 0, "speculation is back after the calibration"


def test_too_little_time_leaves_large_loads_out() -> None:
    engine = small_engine(max_num_seqs=4)
    assert list(calibrate(engine, 0.0)) == [1]


def test_without_a_draft_nothing_is_calibrated() -> None:
    assert calibrate(small_engine(draft=False), 60) == {}
