"""Counters of reports as workers count them."""

from __future__ import annotations

from collections.abc import Sequence

from specdecode_worker.contract import AcceptanceCell, StepCell


def main_cell(draft: str, task: str, depth: int, ranks: Sequence[int]) -> AcceptanceCell:
    """Return what became of the main path of greedy requests at one depth."""
    return AcceptanceCell(draft=draft, task=task, sampled=False, depth=depth, parent="main", ranks=tuple(ranks))


def step_values(seconds: float, emitted: int, x: Sequence[float]) -> list[float]:
    """Return the sums of one decode step for `step_cell`."""
    xx = [x[i] * x[j] for i in range(6) for j in range(i, 6)]
    return [1, seconds, seconds**2, emitted, *x, *(value * seconds for value in x), *xx]


def step_cell(tokens_bucket: int, draft_passes: int, context_bucket: int, values: Sequence[float]) -> StepCell:
    """Return the cell of decode steps with these sums."""
    return StepCell(
        tokens_bucket=tokens_bucket,
        draft_passes=draft_passes,
        prefill=False,
        context_bucket=context_bucket,
        count=int(values[0]),
        t=values[1],
        tt=values[2],
        emitted=int(values[3]),
        x=tuple(values[4:10]),
        xt=tuple(values[10:16]),
        xx=tuple(values[16:]),
        device_seconds=values[1],
        wall_seconds=values[1],
        clipped=0,
    )
