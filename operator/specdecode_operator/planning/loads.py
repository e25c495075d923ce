"""Loads: the buckets of a plan, and the load that was observed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from specdecode_operator.planning.tuning import TUNING
from specdecode_operator.state.learned import ContextCell, LoadState, rounded
from specdecode_operator.telemetry.counters import Delta
from specdecode_worker.contract import FEATURES, Buckets

_SEQUENCES = FEATURES.index("sequences")


class Load(NamedTuple):
    """The typical step of one bucket."""

    sequences: float
    context_tokens: float
    """KV tokens of one sequence."""
    context: int = 0
    """Context bucket."""


def buckets(max_num_seqs: int) -> Buckets:
    """Return concurrency edges at powers of two below ``max_num_seqs``, where the last bucket ends."""
    powers = range(max(1, (max_num_seqs - 1).bit_length()))
    return Buckets(concurrency=tuple(1 << power for power in powers), context=TUNING.context_edges)


def bucket_of(edges: tuple[int, ...], value: float) -> int:
    """Return the index of the bucket of ``value``. Upper edges are inclusive, the last bucket is open."""
    return bisect_left(edges, value)


def present_row(load: LoadState, found: Buckets) -> tuple[int, int]:
    """Return the buckets (concurrency, context) of the last observed load."""
    # The mean counts as the next whole number: with the nearest one, changes are followed later (simulator.md).
    return bucket_of(found.concurrency, load.sequences), min(load.context_bucket, len(found.context))


def observed_load(known: LoadState, delta: Delta, now: float) -> LoadState:
    """Return the load of this poll, or ``known`` if the poll had few steps and they took less than a second."""
    decoding = {key: moments for key, moments in delta.steps.items() if not key.prefill}
    count = sum(moments.count for moments in decoding.values())
    if count < TUNING.min_samples and sum(moments.seconds for moments in decoding.values()) < 1:
        return known
    by_context: dict[int, float] = {}
    for key, moments in decoding.items():
        by_context[key.context_bucket] = by_context.get(key.context_bucket, 0) + moments.seconds
    tasks = {task: hits.total for (task, depth), hits in delta.acceptance.items() if depth == 1}
    return LoadState(
        sequences=rounded(sum(moments.x[_SEQUENCES] for moments in decoding.values()) / count),
        context_bucket=max(by_context, key=by_context.__getitem__),
        task=max(tasks, key=tasks.__getitem__, default=known.task),
        at=now,
    )


def bucket_text(found: Buckets, at: Iterable[tuple[int, int]]) -> str:
    """Return the names of loads (concurrency, context), for decisions."""
    names = dict[str, list[str]]()
    for concurrency, context in at:
        names.setdefault(_range(found.context, context), []).append(_range(found.concurrency, concurrency))
    return "; ".join(f"concurrency {' or '.join(counts)}, context {context}" for context, counts in names.items())


def context_rates(found: Buckets, cells: Iterable[ContextCell]) -> dict[str, dict[str, float]]:
    """Return the acceptance of the first draft token by task and name of the context, of tasks seen in several."""
    rates = dict[str, dict[str, float]]()
    for cell in sorted(cells, key=lambda cell: (cell.task, cell.context)):
        if cell.total >= TUNING.task_samples:
            rates.setdefault(cell.task, {})[_range(found.context, cell.context)] = cell.hits / cell.total
    return {task: own for task, own in rates.items() if len(own) > 1}


def _range(edges: tuple[int, ...], index: int) -> str:
    if index == len(edges):
        return f">{edges[-1]}"
    low, high = edges[index - 1] + 1 if index else 1, edges[index]
    return str(high) if low == high else f"{low}-{high}" if index else f"<={high}"
