"""The report: every counter is in its field, and its size never exceeds what the operator reads."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from specdecode_operator.telemetry.counters import difference
from specdecode_operator.telemetry.polling import read_report
from specdecode_worker.contract import (
    MAX_RANKS,
    MAX_REPORT_BYTES,
    MAX_TASKS,
    Buckets,
    DraftState,
    PhaseSeconds,
    PlanState,
    Report,
    StepTime,
    SyntheticKnobs,
)
from specdecode_worker.engine.stats import (
    MAX_STEP_CELLS,
    AcceptanceCategory,
    Statistics,
    StepSize,
    build_report,
)
from support.small_llama import identity

MOMENT = Report(
    **asdict(identity(9)),
    draft=DraftState(method="eagle3", hash="d"),
    named_drafts=(),
    clock_seconds=12.5,
    running=2,
    waiting=3,
    kv_tokens_total=640,
    kv_tokens_used=64,
    kv_tokens_cached=32,
    preemptions=5,
    prefill_chunks=6,
    prefix_query_tokens=70,
    prefix_hit_tokens=48,
    plan=PlanState(uid="u", version=4),
    synthetic=SyntheticKnobs(step_time=(StepTime(seconds=0.1),)),
    phases=PhaseSeconds(draft=1.0),
    guard=(),
)


def size(kind: int) -> StepSize:
    return StepSize(
        sequences=13, verify_tokens=1 << kind % 10, kv_tokens=123_457, draft_passes=kind // 10, prefill_tokens=0
    )


def busy(tasks: int, depth: int, kinds: int) -> Statistics:
    """Return statistics with this many tasks, depths and kinds of steps. The first ones have the highest counts."""
    statistics = Statistics()
    for task in range(tasks):
        for sampled in (False, True):
            category = AcceptanceCategory(f"a-task-whose-name-is-long-{task}", sampled, "0123456789abcdef")
            statistics.traffic(category.task).arrivals += 1
            for level in range(1, depth + 1):
                for main in (True, False):
                    for rank in range(MAX_RANKS + 1):
                        statistics.ranks(category).levels(level, main=main)[level - 1][rank] += 1_000_000 >> level
    for kind in range(kinds):
        for _ in range(2 if kind < 3 else 1):
            statistics.costs.add(kind % 3, size(kind), 7, 0.0123456789)
    return statistics


def test_the_operator_reads_what_a_worker_reports_and_what_happened_between() -> None:
    statistics = busy(2, 6, 40)
    statistics.record_draft("other", 4, 2)
    statistics.running_request_seconds, statistics.waiting_request_seconds = 7.0, 8.0
    before = build_report(MOMENT, statistics)
    statistics.record_draft("other", 5, 3)
    after = build_report(MOMENT.model_copy(update={"clock_seconds": 14.5}), statistics)
    assert read_report(after.model_dump_json().encode()) == after
    assert (after.running_request_seconds, after.waiting_request_seconds) == (7, 8)
    delta = difference(before, after, at=100, buckets=Buckets())
    assert (delta.drafts, delta.draft_tokens, delta.accepted_tokens, delta.plain_steps) == (1, 5, 3, 0)
    assert set(delta.traffic) == {cell.task for cell in after.traffic}


@pytest.mark.parametrize(("tasks", "depth", "kinds"), [(2, 6, 30), (MAX_TASKS, 16, 64), (MAX_TASKS + 4, 16, 200)])
def test_a_report_is_never_larger_than_the_operator_reads(tasks: int, depth: int, kinds: int) -> None:
    report = build_report(MOMENT, busy(tasks, depth, kinds))
    assert len(report.model_dump_json().encode()) <= MAX_REPORT_BYTES
    assert len(report.tasks) <= MAX_TASKS + 1
    assert len(report.steps) >= 8, "a planner can do nothing without the cost of steps"
    assert {cell.depth for cell in report.acceptance} >= set(range(1, 5))


def test_nothing_is_left_out_of_a_small_report() -> None:
    report = build_report(MOMENT, busy(2, 6, 30))
    assert (len(report.acceptance), len(report.steps)) == (2 * 2 * 6 * 2, 30)


def test_cells_with_the_fewest_steps_are_left_out() -> None:
    report = build_report(MOMENT, busy(1, 1, 200))
    assert len(report.steps) <= MAX_STEP_CELLS
    assert sum(cell.count == 2 for cell in report.steps) == 3
