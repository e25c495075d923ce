"""Measurements over the window of the last minute, of the fleet and of each task: acceptance, latency and speed-up.

Speed-up is the time that plain decoding would have taken for the decoded tokens, divided by the time taken, at the same
loads. All decoding steps count: steps with a draft, plain steps where the plan or a guard runs plain decoding, and
exploration. A cell is one kind of step: without prefill, one context bucket, one number of draft passes and one bucket
of packed tokens. Each cell is compared with plain steps at the cell's mean number of sequences, interpolated between
the plain cells of the same context (up to a factor 1.22 beyond the outermost). The time per token of one sequence is
seconds x mean sequences / emitted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from specdecode_operator.planning.tuning import TUNING
from specdecode_operator.state.learned import AcceptanceCell, StepTimeCell
from specdecode_operator.telemetry.counters import NO_REQUESTS, NO_STEPS, CellKey, Moments, RequestSums, TaskSums
from specdecode_operator.telemetry.deltas import Delta, over
from specdecode_operator.types import Figures, Speed, TaskFigures
from specdecode_worker.contract import FEATURES

_SEQUENCES = FEATURES.index("sequences")


class Point(NamedTuple):
    """Time per token at one number of sequences."""

    sequences: float
    per_token: float
    """Seconds per token of one sequence."""


class _Comparison(NamedTuple):
    """Steps of one kind, and plain decoding of the same tokens."""

    key: CellKey
    moments: Moments
    plain_per_token: float | None
    """Seconds per token of one sequence in plain steps at the same load. None where none are known."""

    @property
    def sequences(self) -> float:
        return self.moments.mean_of(_SEQUENCES)


def figures(
    window: Iterable[Delta],
    costs: Iterable[StepTimeCell],
    task_depths: Mapping[str, int],
    *,
    synthetic: bool,
    saved_device_seconds: float | None = None,
) -> Figures:
    """Return the measurements over ``window``, oldest first.

    ``costs`` are used where the window has too few plain steps. ``task_depths`` are those of the rows in use.
    """
    total = over(window)
    overall = speedup(total.steps, costs)
    return Figures(
        running=total.running,
        waiting=total.waiting,
        tokens_per_second=total.output_tokens / total.seconds if total.seconds else 0,
        synthetic=synthetic,
        speed=Speed(
            acceptance_rate=total.accepted_tokens / total.draft_tokens,
            accepted_length=1 + total.accepted_tokens / total.drafts,
        )
        if total.drafts >= TUNING.fleet_samples and total.draft_tokens > 0
        else None,
        speedup=overall,
        tasks=_tasks(total, task_depths, overall),
        saved_device_seconds=saved_device_seconds,
    )


def first_acceptance(cells: Iterable[AcceptanceCell]) -> float | None:
    """Return the acceptance rate of the first drafted token over all tasks. It does not depend on the depth in use."""
    first = [cell for cell in cells if cell.depth == 1]
    total = sum(cell.total for cell in first)
    return sum(cell.hits for cell in first) / total if total else None


def speedup(steps: Mapping[CellKey, Moments], costs: Iterable[StepTimeCell]) -> float | None:
    """Return the speed-up of all decoding steps over plain decoding, time counted for each sequence.

    None if few tokens were decoded, or if plain steps are known for less than half of them.
    """
    plain_seconds = seconds = tokens = compared = 0.0
    for cell in _compared(steps, costs):
        tokens += cell.moments.emitted
        if cell.plain_per_token is not None:
            taken = cell.moments.seconds * cell.sequences
            compared += cell.moments.emitted
            seconds += taken
            plain_seconds += cell.plain_per_token * cell.moments.emitted if cell.key.draft_passes else taken
    if tokens < TUNING.fleet_samples or compared < tokens / 2 or seconds <= 0:
        return None
    return plain_seconds / seconds


def saved_seconds(delta: Delta, costs: Iterable[StepTimeCell]) -> float:
    """Return the seconds of worker time that speculation saved in ``delta``; losses count negative.

    The tokens of every kind of step with draft passes would have taken plain time per token x tokens / sequences
    seconds of one worker. A worker with several devices saves the result on each.
    """
    saved = 0.0
    for cell in _compared(delta.steps, costs):
        if cell.key.draft_passes and cell.plain_per_token is not None:
            saved += cell.plain_per_token * cell.moments.emitted / cell.sequences - cell.moments.seconds
    return saved


def interpolated(points: list[Point], sequences: float) -> float | None:
    """Return the seconds per token at ``sequences`` between ``points`` in rising order, or None if too far outside."""
    reach = math.sqrt(TUNING.load_ratio)
    if not points or not points[0].sequences / reach <= sequences <= points[-1].sequences * reach:
        return None
    xs, ys = [point.sequences for point in points], [point.per_token for point in points]
    return float(np.interp(sequences, xs, ys))


def _compared(steps: Mapping[CellKey, Moments], costs: Iterable[StepTimeCell]) -> Iterator[_Comparison]:
    """Yield every kind of decoding step that emitted tokens, with the plain time per token at its load."""
    remembered = {CellKey.of(cell): Moments(cell.values) for cell in costs}
    for key, moments in steps.items():
        if not key.prefill and moments.count >= 1 and moments.emitted >= 1:
            plain = _plain_per_token(steps, remembered, key.context_bucket, moments.mean_of(_SEQUENCES))
            yield _Comparison(key, moments, plain)


def _plain_per_token(
    steps: Mapping[CellKey, Moments], remembered: Mapping[CellKey, Moments], context: int, sequences: float
) -> float | None:
    points = []
    for key in {**remembered, **steps}:
        if key.prefill or key.draft_passes or key.context_bucket != context:
            continue
        fresh = steps.get(key)
        moments = fresh if fresh and fresh.count >= TUNING.min_samples else remembered.get(key, fresh)
        if moments and moments.count >= 1 and moments.emitted >= 1:
            mean = moments.mean_of(_SEQUENCES)
            points.append(Point(mean, moments.seconds * mean / moments.emitted))
    return interpolated(sorted(points), sequences)


def _tasks(total: Delta, depths: Mapping[str, int], overall: float | None) -> dict[str, TaskFigures]:
    """Return the measurements of every task that had traffic in the window."""
    decoded = sum(sums.decode_tokens for sums in total.tasks.values())
    steps = sum(sums.decode_steps for sums in total.tasks.values())
    tokens_per_step = decoded / steps if steps > 0 else None
    measured = {
        task: _task(
            total.requests.get(task, NO_REQUESTS),
            total.tasks.get(task, NO_STEPS),
            depths.get(task, 0),
            overall / tokens_per_step if overall is not None and tokens_per_step else None,
        )
        for task in sorted({*total.requests, *total.tasks})
    }
    return {task: values for task, values in measured.items() if values != TaskFigures()}


def _task(requests: RequestSums, sums: TaskSums, depth: int, speedup_per_token: float | None) -> TaskFigures:
    """Return the measurements of one task, whose row has ``depth``.

    Tasks share steps, so a task's speed-up is the fleet's x the task's tokens per step / the fleet's tokens per step.
    """
    least = TUNING.fleet_samples / 10
    accepted = requests.a / requests.d if requests.d >= least else None
    gain = None
    if speedup_per_token is not None and sums.decode_steps >= least:
        gain = speedup_per_token * sums.decode_tokens / sums.decode_steps
    return TaskFigures(
        acceptance_rate=None if accepted is None else (min(1.0, accepted / depth) if depth else 0.0),
        accepted_length=None if accepted is None else 1 + accepted,
        ttft_seconds=_mean(sums.ttft_seconds, sums.ttft_count),
        itl_seconds=_mean(sums.itl_seconds, sums.itl_count),
        speedup=gain,
    )


def _mean(total: float, count: float) -> float | None:
    return total / count if count > 0 else None
