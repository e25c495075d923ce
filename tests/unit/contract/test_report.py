"""Facts that follow from the reports of several workers."""

from __future__ import annotations

from specdecode_worker.contract import GuardCell, PlanState, Report, suppressed_loads


def report(version: int, *suppressed: int) -> Report:
    cells = tuple(
        GuardCell(concurrency=c, context=0, speculative=2, plain=1, suppressed=c in suppressed) for c in range(3)
    )
    return Report(boot_id="b", worker="w", clock_seconds=1, plan=PlanState(version=version), guard=cells)


def test_speculation_is_suspended_where_all_guards_of_the_plan_suspend_it() -> None:
    assert suppressed_loads([report(4, 0, 1), report(4, 1, 2), report(3)], 4) == {(1, 0)}
    assert suppressed_loads([], 4) == set()


def test_a_guard_without_a_verdict_has_no_say() -> None:
    undecided = report(4).model_copy(update={"guard": ()})
    assert suppressed_loads([report(4, 1), undecided], 4) == {(1, 0)}
