"""Calibration: loads are timed plainly on made-up requests, of which nothing stays but what steps cost."""

from __future__ import annotations

import pytest
from small_engine import drain, plan_of, small_engine, submit

from specdecode_worker.engine.calibration import calibrate


def test_every_load_is_timed_and_nothing_else_stays() -> None:
    engine = small_engine(max_num_seqs=4)
    engine.set_plan(plan_of("chain:3", guard=True))
    found = calibrate(engine, 60)
    assert list(found) == [1, 2, 4]
    assert min(found.values()) > 0
    report = engine.report()
    assert engine.idle
    engine.check()
    assert (report.traffic, report.acceptance, report.drafts, report.plain_steps) == ((), (), 0, 0)
    assert {cell.draft_passes for cell in report.steps} == {0}
    assert sum(cell.count for cell in report.steps) >= 3 * 5


def test_the_guard_knows_what_plain_decoding_takes_before_it_has_seen_any() -> None:
    engine = small_engine(max_num_seqs=4)
    engine.set_plan(plan_of("chain:3", guard=True))
    found = calibrate(engine, 60)
    engine.add(submit("a", max_tokens=4))  # over before the guard could stop anything, and run plain steps of its own
    drain(engine)
    cells = {cell.concurrency: cell for cell in engine.report().guard}
    assert cells[0].plain == pytest.approx(found[1])
    assert engine.report().drafts > 0, "speculation is back after the calibration"


def test_too_little_time_leaves_large_loads_out() -> None:
    engine = small_engine(max_num_seqs=4)
    assert list(calibrate(engine, 0.0)) == [1]


def test_without_a_draft_there_is_nothing_to_compare() -> None:
    assert calibrate(small_engine(draft=False), 60) == {}
