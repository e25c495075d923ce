"""Measurements over the window of the last minute, of the fleet and of each task: acceptance, latency and speed-up.

Speed-up is the time that plain decoding would have taken for the decoded tokens, divided by the time taken, at the same
loads. All decoding steps count: drafted ones, plain ones and exploration. Each kind of step is compared with plain
steps of the same context at its mean number of sequences. The time per token of one sequence is seconds x mean
sequences / emitted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from specdecode_operator.planning.tuning import TUNING
from specdecode_operator.state.learned import AcceptanceCell, StepTimeCell
from specdecode_operator.telemetry.counters import NO_REQUESTS, NO_STEPS, CellKey, Delta, Moments, over
from specdecode_operator.types import Figures, Speed, TaskFigures
from specdecode_worker.contract import FEATURES

_SEQUENCES = FEATURES.index("sequences")


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
    overall, speed = speedup(total.steps, costs), None
    if total.drafts >= TUNING.fleet_samples and total.draft_tokens > 0:
        accepted = total.accepted_tokens
        speed = Speed(acceptance_rate=accepted / total.draft_tokens, accepted_length=1 + accepted / total.drafts)
    tasks = {task: _task(total, task, task_depths, overall) for task in sorted({*total.requests, *total.tasks})}
    return Figures(
        running=total.running,
        waiting=total.waiting,
        tokens_per_second=total.output_tokens / total.seconds if total.seconds else 0,
        synthetic=synthetic,
        speed=speed,
        speedup=overall,
        tasks={task: values for task, values in tasks.items() if values != TaskFigures()},
        saved_device_seconds=saved_device_seconds,
    )


def first_acceptance(cells: Iterable[AcceptanceCell]) -> float | None:
    """Return the acceptance rate of the first drafted token over all tasks. It does not depend on the depth in use."""
    first = [cell for cell in cells if cell.depth == 1]
    return _ratio(sum(cell.hits for cell in first), sum(cell.total for cell in first))


def speedup(steps: Mapping[CellKey, Moments], costs: Iterable[StepTimeCell]) -> float | None:
    """Return the speed-up of all decoding steps over plain decoding, time counted for each sequence.

    None if few tokens were decoded, or if plain steps are known for less than half of them.
    """
    compared = list(_compared(steps, costs))
    known = [(moments.mean_of(_SEQUENCES), moments, plain) for moments, plain in compared if plain is not None]
    tokens = sum(moments.emitted for moments, _ in compared)
    if tokens < TUNING.fleet_samples or 2 * sum(moments.emitted for _, moments, _ in known) < tokens:
        return None
    return _ratio(sum(each * plain for each, _, plain in known), sum(each * taken.seconds for each, taken, _ in known))


def saved_seconds(delta: Delta, costs: Iterable[StepTimeCell]) -> float:
    """Return the seconds of worker time that speculation saved in ``delta``; losses count negative.

    A worker with several devices saves the result on each.
    """
    return sum(plain - moments.seconds for moments, plain in _compared(delta.steps, costs) if plain is not None)


def interpolated(points: Sequence[tuple[float, float]], sequences: float) -> float | None:
    """Return the seconds per token at ``sequences`` between ``points`` (sequences, seconds per token).

    None if ``sequences`` is too far outside of them.
    """
    reach, points = math.sqrt(TUNING.load_ratio), sorted(points)
    if not points or not points[0][0] / reach <= sequences <= points[-1][0] * reach:
        return None
    known, seconds = zip(*points, strict=True)
    return float(np.interp(sequences, known, seconds))


def _compared(
    steps: Mapping[CellKey, Moments], costs: Iterable[StepTimeCell]
) -> Iterator[tuple[Moments, float | None]]:
    """Yield every kind of decoding step that emitted tokens, with the seconds of plain steps that emit as many.

    None where no plain steps are known at this load. Plain steps are compared with themselves.
    """
    known = {CellKey.of(cell): Moments(cell.values) for cell in costs}
    known |= {key: fresh for key, fresh in steps.items() if key not in known or fresh.count >= TUNING.min_samples}
    points: dict[int, list[tuple[float, float]]] = {}
    for key, moments in known.items():
        if not key.prefill and not key.draft_passes and min(moments.count, moments.emitted, moments.x[_SEQUENCES]) >= 1:
            sequences = moments.mean_of(_SEQUENCES)
            points.setdefault(key.context_bucket, []).append((sequences, moments.seconds * sequences / moments.emitted))
    for key, moments in steps.items():
        if not key.prefill and min(moments.count, moments.emitted, moments.x[_SEQUENCES]) >= 1:
            sequences = moments.mean_of(_SEQUENCES)
            plain = interpolated(points.get(key.context_bucket, ()), sequences)
            if plain is not None:  # without drafts the same step is no longer; where it was, the machine was busy
                plain = min(plain, moments.mean_seconds)
            plain_seconds = None if plain is None else plain * moments.emitted / sequences
            yield moments, plain_seconds if plain is None or key.draft_passes else moments.seconds


def _task(total: Delta, task: str, depths: Mapping[str, int], overall: float | None) -> TaskFigures:
    """Return the measurements of one task.

    Tasks share steps, so a task's speed-up is the fleet's x the task's tokens per step / the fleet's tokens per step.
    """
    requests, sums, depth = total.requests.get(task, NO_REQUESTS), total.tasks.get(task, NO_STEPS), depths.get(task, 0)
    accepted = requests.a / requests.d if requests.d >= TUNING.task_samples else None
    decoded = sum(each.decode_tokens for each in total.tasks.values())
    steps = sum(each.decode_steps for each in total.tasks.values())
    gain = None
    if overall is not None and decoded > 0 and sums.decode_steps >= TUNING.task_samples:
        gain = overall * (sums.decode_tokens / sums.decode_steps) / (decoded / steps)
    return TaskFigures(
        acceptance_rate=None if accepted is None else (min(1.0, accepted / depth) if depth else 0.0),
        accepted_length=None if accepted is None else 1 + accepted,
        ttft_seconds=_ratio(sums.ttft_seconds, sums.ttft_count),
        itl_seconds=_ratio(sums.itl_seconds, sums.itl_count),
        speedup=gain,
    )


def _ratio(total: float, count: float) -> float | None:
    return total / count if count > 0 else None
