"""Memories made by hand: what a planner knows after this or that was measured."""

from __future__ import annotations

import math
from typing import Any

from specdecode_operator.api.v1alpha1 import SpeculationSpec
from specdecode_operator.planning.estimates import Load, buckets_for, features
from specdecode_operator.planning.search import Chosen, choose
from specdecode_operator.state.learned import AcceptanceCell, LearnedState, RowState, StepTimeCell
from specdecode_operator.telemetry.counters import PAIRS, Moments
from support.operators.fleet import speculation_of


def moments(
    x: tuple[float, ...], seconds: float, count: float = 100, spread: float = 0.02, tokens: float = 1
) -> Moments:
    """Return sums of steps that look like ``x``, take about ``seconds``, and emit ``tokens`` a sequence."""
    squared = seconds**2 * (1 + spread**2)
    emitted = x[1] * tokens
    values = (count, count * seconds, count * squared, count * emitted)
    sums = (*(count * v for v in x), *(count * v * seconds for v in x), *(count * x[i] * x[j] for i, j in PAIRS))
    return Moments((*values, *sums))


def cost(sequences: float, depth: int, seconds: float, *, count: float = 100, at: float = 1000) -> StepTimeCell:
    x = features(Load(sequences, 500), depth)
    bucket = 1 << max(0, math.ceil(math.log2(x[2])))
    return StepTimeCell(
        tokens_bucket=bucket,
        draft_passes=depth,
        prefill=False,
        context_bucket=0,
        values=moments(x, seconds, count).values,
        at=at,
    )


def truth(sequences: float, depth: int) -> float:
    return 0.02 + 0.002 * depth + 0.0004 * sequences * (depth + 1)


def chances(p: float, depth: int = 5, total: float = 1000, task: str = "other") -> tuple[AcceptanceCell, ...]:
    return tuple(AcceptanceCell(task=task, depth=d, hits=p * total, total=total, at=1000) for d in range(1, depth + 1))


def planned(speculation: SpeculationSpec, learned: LearnedState, now: float = 2000.0, **more: Any) -> Chosen:
    """Return what the planner chooses at ``now``, for workers of 16 sequences."""
    return choose(speculation, learned, buckets_for(16), max_num_seqs=16, now=now, **more)


def depths_of(speculation: SpeculationSpec, learned: LearnedState, now: float = 2000.0) -> list[int]:
    return [row.depth for row in planned(speculation, learned, now).rows]


def spec(**fields: Any) -> SpeculationSpec:
    return speculation_of({"method": "eagle3", "draft": {"uri": "embedded://d"}, **fields})


FULL = tuple(cost(n, d, truth(n, d)) for n in (1, 4, 16) for d in range(6))
"""Every depth timed at 1, 4 and 16 sequences."""

OFF = RowState(concurrency=0, context=0, task="other", depth=0, since=1000)
"""Speculation lost here at 1000."""
