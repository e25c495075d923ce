"""What steps cost by the first report of a worker: what it timed before it served, or ran before we came.

Only kinds of steps that nobody has told of yet are taken from there: a first report sums all that was since the
worker's boot, and what is measured from poll to poll is newer and knows its own spread.
"""

from __future__ import annotations

from collections.abc import Iterable

from specdecode_operator.planning.change import LEAST_STEPS
from specdecode_operator.planning.steptime import LEAST_SECONDS
from specdecode_operator.state.learned import LearnedState, StepTimeCell
from specdecode_operator.telemetry.counters import CellKey, Moments, summed
from specdecode_worker.contract import Buckets, Report

MOST_STEPS = 24.0
"""Weight of what a first report says, in steps: so much as a poll or two, and gone as soon."""


def meet(learned: LearnedState, reports: Iterable[Report], found: Buckets, *, now: float) -> LearnedState:
    """``learned`` with what the first ``reports`` of workers know of costs. Steps with another draft say nothing."""
    told = summed(pair for report in reports if report.plan.buckets == found for pair in _told(report, learned.draft))
    if not told:
        return learned
    known = {CellKey.of(cell) for cell in learned.costs}
    fresh = [_cost(key, moments, now) for key, moments in told.items() if key not in known]
    return (
        learned.model_copy(update={"costs": tuple(sorted((*learned.costs, *fresh), key=CellKey.of))})
        if fresh
        else learned
    )


def _told(report: Report, draft: str) -> Iterable[tuple[CellKey, Moments]]:
    for cell in report.steps:
        timed = cell.count >= LEAST_STEPS and cell.t > LEAST_SECONDS * cell.count
        if timed and not cell.prefill and (not cell.draft_passes or report.draft.hash == draft):
            yield CellKey.of(cell), Moments.of_cell(cell)


def _cost(key: CellKey, moments: Moments, now: float) -> StepTimeCell:
    light = moments.times(min(1.0, MOST_STEPS / moments.count))
    if not key.draft_passes:
        return StepTimeCell(**key._asdict(), values=light.values, at=now, spell_at=now)
    # How many drafted tokens are accepted of made-up text says nothing; a plain step emits what it always does.
    silent = light.with_emitted(0.0)
    return StepTimeCell(**key._asdict(), values=silent.values, at=now, spell_at=now, made_up=light.count)
