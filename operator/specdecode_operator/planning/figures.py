"""ACCEPT and SPEEDUP: differences of the whole fleet's counters over the window.

Speedup is what speculation brings as it runs: the time that plain decoding would have taken over the time that was
taken, at the same loads. Whatever decoded counts as it was - plain steps where the plan or a guard holds speculation
back, and what exploration costs - so a shape that only ever ran in bursts says nothing of itself. A cell here is:
steps without prefill, one context bucket, one number of running sequences. StepCell sums steps of several numbers of
sequences, so each cell is compared with plain steps at its own mean number of sequences, interpolated between plain
cells (at most 1.25 beyond the outermost). Time per token of a cell is seconds x mean sequences / emitted tokens;
cells weigh by the tokens that they emitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from specdecode_operator.state.learned import AcceptanceCell, StepTimeCell
from specdecode_operator.telemetry.counters import CellKey, Moments
from specdecode_operator.telemetry.deltas import Delta, over
from specdecode_operator.types import Figures, Speed
from specdecode_worker.contract import FEATURES

LEAST_DRAFTS = 500
LEAST_TASK_DRAFTS = 50
LEAST_TOKENS = 500
LEAST_COMPARED = 0.5
"""Of the window's tokens must have come from steps that plain ones are known for."""
LEAST_PLAIN_STEPS = 8
REACH = 1.25

_SEQUENCES = FEATURES.index("sequences")


class Point(NamedTuple):
    """One timed kind of step: sequences a step, seconds per token of one sequence."""

    sequences: float
    per_token: float


def figures(
    window: Iterable[Delta], costs: Iterable[StepTimeCell], task_depths: Mapping[str, int], *, synthetic: bool
) -> Figures:
    """Of the window; plain steps that are too few in it are taken from the remembered ``costs``."""
    total = over(window)
    return Figures(
        running=total.running,
        waiting=total.waiting,
        tokens_per_second=total.output_tokens / total.seconds if total.seconds else 0,
        synthetic=synthetic,
        speed=_speed(total),
        speedup=speedup(total.steps, costs),
        tasks=_tasks(total, task_depths),
    )


def first_acceptance(cells: Iterable[AcceptanceCell]) -> float | None:
    """How often the draft's first token is right, all tasks together: the same whatever depth runs."""
    first = [cell for cell in cells if cell.depth == 1]
    total = sum(cell.total for cell in first)
    return sum(cell.hits for cell in first) / total if total else None


def _speed(total: Delta) -> Speed | None:
    if total.drafts < LEAST_DRAFTS or total.draft_tokens <= 0:
        return None
    return Speed(
        acceptance_rate=total.accepted_tokens / total.draft_tokens,
        accepted_length=1 + total.accepted_tokens / total.drafts,
    )


def speedup(steps: Mapping[CellKey, Moments], costs: Iterable[StepTimeCell]) -> float | None:
    """None where too little was decoded, or too little of it has plain steps to be compared with."""
    remembered = {CellKey.of(cell): Moments(cell.values) for cell in costs}
    plain_seconds = seconds = tokens = compared = 0.0
    for key, moments in steps.items():
        if key.prefill or moments.count < 1 or moments.emitted < 1:
            continue
        tokens += moments.emitted
        plain = _plain_per_token(steps, remembered, key.context_bucket, moments.mean_of(_SEQUENCES))
        if plain is not None:
            taken = moments.seconds * moments.mean_of(_SEQUENCES)
            compared += moments.emitted
            seconds += taken
            plain_seconds += plain * moments.emitted if key.draft_passes else taken
    if tokens < LEAST_TOKENS or compared < LEAST_COMPARED * tokens or seconds <= 0:
        return None
    return plain_seconds / seconds


def _plain_per_token(
    steps: Mapping[CellKey, Moments], remembered: Mapping[CellKey, Moments], context: int, sequences: float
) -> float | None:
    points = []
    for key in {**remembered, **steps}:
        if key.prefill or key.draft_passes or key.context_bucket != context:
            continue
        fresh = steps.get(key)
        moments = fresh if fresh and fresh.count >= LEAST_PLAIN_STEPS else remembered.get(key, fresh)
        if moments and moments.count >= 1 and moments.emitted >= 1:
            mean = moments.mean_of(_SEQUENCES)
            points.append(Point(mean, moments.seconds * mean / moments.emitted))
    return interpolated(sorted(points), sequences)


def interpolated(points: list[Point], sequences: float) -> float | None:
    """Seconds per token between ``points`` in rising order; None too far beyond the outermost."""
    if not points or not points[0].sequences / REACH <= sequences <= points[-1].sequences * REACH:
        return None
    below = max((point for point in points if point.sequences <= sequences), default=points[0])
    above = min((point for point in points if point.sequences >= sequences), default=points[-1])
    if above.sequences - below.sequences < 1e-9:
        return below.per_token
    share = (sequences - below.sequences) / (above.sequences - below.sequences)
    return below.per_token + min(1.0, max(0.0, share)) * (above.per_token - below.per_token)


def _tasks(total: Delta, depths: Mapping[str, int]) -> dict[str, Speed]:
    """Tokens per step from the requests that ended; acceptance as the share of the depth that the task's row has."""
    found = {}
    for task, sums in total.requests.items():
        if sums.d >= LEAST_TASK_DRAFTS:
            accepted = sums.a / sums.d
            rate = min(1.0, accepted / depths[task]) if depths.get(task) else 0.0
            found[task] = Speed(acceptance_rate=rate, accepted_length=1 + accepted)
    return found
