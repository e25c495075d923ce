"""Loads: the buckets of a plan, and what a typical step in each of them looks like."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from specdecode_operator.state.learned import LoadState, StepTimeCell
from specdecode_operator.telemetry.counters import Moments
from specdecode_worker.contract import FEATURES, Buckets

CONTEXT_EDGES = (1024, 8192)
"""The same for every deployment: remembered cells stay comparable when a spec changes."""

MOST_CONTEXT = 1e8
"""Tokens of one sequence that nobody has: a report may say anything."""

_TYPICAL_CONTEXT = (512.0, 4096.0, 12288.0)
_SEQUENCES = FEATURES.index("sequences")
_KV_TOKENS = FEATURES.index("kv_tokens")


class Load(NamedTuple):
    """One bucket's typical step."""

    sequences: float
    context_tokens: float
    """KV tokens of one sequence."""


def buckets(max_num_seqs: int) -> Buckets:
    """Concurrency edges at powers of two below the most a worker runs; the last bucket ends at that."""
    edges = [1]
    while edges[-1] * 2 < max_num_seqs:
        edges.append(edges[-1] * 2)
    return Buckets(concurrency=tuple(edges), context=CONTEXT_EDGES)


def bucket_of(edges: tuple[int, ...], value: float) -> int:
    """Index of the bucket that holds ``value``: upper edges are inclusive, the last bucket is open."""
    return sum(value > edge for edge in edges)


def typical(costs: Iterable[StepTimeCell], found: Buckets, concurrency: int, context: int, max_num_seqs: int) -> Load:
    """What was measured in the bucket; where nobody has been, its upper edge and a middling context."""
    low = found.concurrency[concurrency - 1] if concurrency else 0
    high = found.concurrency[concurrency] if concurrency < len(found.concurrency) else max_num_seqs
    inside = [
        moments
        for cell in costs
        if cell.context_bucket == context and low < (moments := Moments(cell.values)).mean_of(_SEQUENCES) <= high
    ]
    count = sum(moments.count for moments in inside)
    if count < 1:
        return Load(float(max(low + 1, high)), _TYPICAL_CONTEXT[min(context, len(_TYPICAL_CONTEXT) - 1)])
    sequences = sum(moments.x[_SEQUENCES] for moments in inside)
    context_tokens = min(MOST_CONTEXT, sum(moments.x[_KV_TOKENS] for moments in inside) / max(count, sequences))
    return Load(max(1.0, sequences / count), context_tokens)


def present_row(load: LoadState, found: Buckets) -> tuple[int, int]:
    """Indices (concurrency, context) of the row at the load that was seen last."""
    return bucket_of(found.concurrency, load.sequences), min(load.context_bucket, len(found.context))


def bucket_text(found: Buckets, concurrency: int, context: int) -> str:
    """A row's load in words, for decisions."""
    return f"concurrency {_range(found.concurrency, concurrency)}, context {_range(found.context, context)}"


def _range(edges: tuple[int, ...], index: int) -> str:
    if index == 0:
        return f"<={edges[0]}" if edges and edges[0] > 1 else "1"
    if index >= len(edges):
        return f">{edges[-1]}"
    low, high = edges[index - 1] + 1, edges[index]
    return str(high) if low == high else f"{low}-{high}"
