"""The monotonic counters of one modelled worker, and the contract.Report made of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdecode_simulator.records.acceptance_walks import BESIDE, DEPTH
from specdecode_simulator.world.segment import Group, Outcome, Segment
from specdecode_worker.contract import (
    FEATURES,
    MAX_RANKS,
    AcceptanceCell,
    ContextCell,
    DraftState,
    LatencyHistogram,
    Report,
    RequestCell,
    StepCell,
    TrafficCell,
)

Array = Any
DRAFT = "recorded-draft"
MOST_STEP_CELLS = 64
K = len(FEATURES)
_ROWS, _COLUMNS = np.triu_indices(K)
TTIT_EDGES = tuple(
    edge / 1000
    for edge in (0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 25, 30, 40, 50, 75, 100, 200, 500, 1000)
)
TTFT_EDGES = tuple(
    edge / 1000 for edge in (1, 2, 5, 10, 20, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 2000, 5000, 10000, 30000)
)
QUEUE_EDGES = tuple(edge / 1000 for edge in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000))


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the indices in groups. ``tails`` returns the present Records.tail_ranks of a kind."""

    labels: tuple[str, ...]
    kinds: tuple[str, ...]
    tails: Callable[[int], Array]


@dataclass(frozen=True, slots=True)
class Features:
    """One step's x, as means over a segment."""

    sequences: float
    verify_tokens: float
    kv_tokens: float
    draft_passes: int
    prefill_tokens: float


@dataclass(slots=True)
class Counters:
    names: Names
    generator: Any
    """Random generator of numpy that spreads misses over ranks."""
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    plain_steps: int = 0
    running_seconds: float = 0.0
    waiting_seconds: float = 0.0
    prefill_chunks: int = 0
    preemptions: int = 0
    _runs: Array = field(init=False)
    """[labels, kinds, 2, DEPTH, 2]: depths reached, and right there, on the main path and beside it."""
    _spread_misses: Array = field(init=False)
    """[labels, kinds, 2, DEPTH] misses that are spread over ranks already."""
    _ranks: Array = field(init=False)
    _contexts: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """First draft tokens, and right ones, by label and context bucket of the batch."""
    _requests: Array = field(init=False)
    _traffic: Array = field(init=False)
    """[labels, 4]: arrivals, finished, prompt and output tokens."""
    _steps: dict[tuple[int, int, bool, int], Array] = field(default_factory=dict)
    _histograms: dict[str, tuple[tuple[float, ...], list[int], list[float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        labels, kinds = len(self.names.labels), len(self.names.kinds)
        self._runs = np.zeros((labels, kinds, 2, DEPTH, 2), dtype=np.int64)
        self._spread_misses = np.zeros((labels, kinds, 2, DEPTH), dtype=np.int64)
        self._ranks = np.zeros((labels, 2, DEPTH, MAX_RANKS + 1), dtype=np.int64)
        self._requests = np.zeros((labels, 6), dtype=np.int64)
        self._traffic = np.zeros((labels, 4))
        for name, edges in (("ttft", TTFT_EDGES), ("ttit", TTIT_EDGES), ("queue", QUEUE_EDGES)):
            self._histograms[name] = (edges, [0] * (len(edges) + 1), [0.0])

    def arrived(self, label: int, prompt_tokens: int) -> None:
        self._traffic[label] += (1, 0, prompt_tokens, 0)

    def finished(self, label: int, accepted: int, drafts: int) -> None:
        self._traffic[label, 1] += 1
        sums = (1, accepted, drafts, accepted * accepted, accepted * drafts, drafts * drafts)
        self._requests[label] += sums

    def latency(self, name: str, seconds: float, times: int = 1) -> None:
        edges, counts, total = self._histograms[name]
        counts[bisect_left(edges, seconds)] += times
        total[0] += seconds * times

    def emitted(self, label: int, tokens: float) -> None:
        self._traffic[label, 3] += tokens

    def ran(self, group: Group, context: int, steps: int, segment: Segment, outcome: Outcome) -> None:
        """The sequences of a group ran so many steps of a segment, whose longest context is in bucket ``context``."""
        form, sums = segment.forms[group], outcome.runs[group]
        if form.nodes:
            self.drafts += steps
            self.draft_tokens += steps * form.nodes
            self.accepted_tokens += int(sums[8])
        else:
            self.plain_steps += steps
        deep = max(form.depth, segment.drafted_depth if segment.shadow else 0)
        deep = min(deep, DEPTH)
        if deep:
            right = sums[:deep].tolist()
            main, beside = self._runs[group.label, group.kind]
            main[:deep] += np.array(([steps, *right[:-1]], right)).T
            first = self._contexts.setdefault((group.label, context), [0, 0])
            first[0], first[1] = first[0] + steps, first[1] + right[0]
            if len(sums) > BESIDE + 1:
                beside[1:] += sums[BESIDE:].reshape(-1, 2)

    def timed(self, x: Features, context: int, steps: float, seconds: float, squares: float, emitted: float) -> None:
        """``steps`` steps took ``seconds`` together, with ``squares`` the sum of their squares."""
        packed = max(1, round(x.verify_tokens + x.prefill_tokens))
        kind = (1 << (packed - 1).bit_length(), x.draft_passes, x.prefill_tokens > 0, context)
        vector = np.array((1.0, x.sequences, x.verify_tokens, x.kv_tokens, x.draft_passes, x.prefill_tokens))
        sums = (steps, seconds, squares, emitted)
        values = np.concatenate((sums, vector * steps, vector * seconds, vector[_ROWS] * vector[_COLUMNS] * steps))
        known = self._steps.pop(kind, None)
        self._steps[kind] = values if known is None else known + values  # the cell of the latest steps is the last one

    def report(self, pending_seconds: float, **state: Any) -> Report:
        """Return the report with further fields in ``state``; ``pending_seconds`` are those of waiting requests."""
        return Report(
            **state,
            draft=DraftState(method="eagle3", hash=DRAFT),
            running_request_seconds=self.running_seconds,
            waiting_request_seconds=self.waiting_seconds + pending_seconds,
            preemptions=self.preemptions,
            prefill_chunks=self.prefill_chunks,
            drafts=self.drafts,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            plain_steps=self.plain_steps,
            acceptance=tuple(self._acceptance()),
            contexts=tuple(self._context_cells()),
            requests=tuple(self._request_cells()),
            steps=tuple(self._step_cells()),
            traffic=tuple(self._traffic_cells()),
            latency=tuple(self._latency_cells()),
        )

    def _acceptance(self) -> Iterator[AcceptanceCell]:
        self._spread()
        for label, task in enumerate(self.names.labels):
            self._ranks[label, ..., 0] = self._runs[label, ..., 1].sum(axis=0)
            for index, parent in enumerate(("main", "sibling")):
                for depth, ranks in enumerate(self._ranks[label, index].tolist(), start=1):
                    if sum(ranks):
                        at = {"task": task, "sampled": False, "depth": depth, "parent": parent}
                        yield AcceptanceCell.model_validate({"draft": DRAFT, **at, "ranks": ranks})

    def _spread(self) -> None:
        """New misses get ranks as the records have them: what was counted is whether the first choice was right."""
        missed = self._runs[..., 0] - self._runs[..., 1]
        for at in np.argwhere(missed > self._spread_misses).tolist():
            label, kind, parent, depth = at
            new = missed[tuple(at)] - self._spread_misses[tuple(at)]
            self._ranks[label, parent, depth] += self.generator.multinomial(new, self.names.tails(kind)[parent, depth])
        self._spread_misses = missed

    def _context_cells(self) -> Iterator[ContextCell]:
        for (label, context), (total, hits) in self._contexts.items():
            task = self.names.labels[label]
            yield ContextCell(draft=DRAFT, task=task, context=context, total=total, hits=hits)

    def _request_cells(self) -> Iterator[RequestCell]:
        for task, sums in zip(self.names.labels, self._requests.tolist(), strict=True):
            if sums[0]:
                n, a, d, aa, ad, dd = sums
                yield RequestCell(draft=DRAFT, task=task, sampled=False, n=n, a=a, d=d, aa=aa, ad=ad, dd=dd)

    def _step_cells(self) -> Iterator[StepCell]:
        latest = [*reversed(self._steps)][:MOST_STEP_CELLS]
        for kind in sorted(latest):
            (bucket, passes, prefill, context), values = kind, self._steps[kind].tolist()
            yield StepCell(
                tokens_bucket=bucket,
                draft_passes=passes,
                prefill=prefill,
                context_bucket=context,
                count=int(values[0]),
                t=values[1],
                tt=values[2],
                emitted=int(values[3]),
                x=tuple(values[4 : 4 + K]),
                xt=tuple(values[4 + K : 4 + 2 * K]),
                xx=tuple(values[4 + 2 * K :]),
                device_seconds=values[1],
                wall_seconds=values[1],
                clipped=0,
            )

    def _traffic_cells(self) -> Iterator[TrafficCell]:
        for task, (arrivals, finished, prompt, output) in zip(self.names.labels, self._traffic.tolist(), strict=True):
            if arrivals:
                yield TrafficCell(
                    task=task,
                    arrivals=int(arrivals),
                    finished=int(finished),
                    prompt_tokens=int(prompt),
                    cached_tokens=0,
                    output_tokens=int(output),
                )

    def _latency_cells(self) -> Iterator[LatencyHistogram]:
        for name, (edges, counts, total) in self._histograms.items():
            yield LatencyHistogram.model_validate({"name": name, "edges": edges, "counts": counts, "sum": total[0]})


class UnreadCounters(Counters):
    """Counters of a worker whose report no policy reads. Steps and their times are not counted, to save time."""

    def ran(self, *args: Any, **named: Any) -> None: ...

    def timed(self, *args: Any, **named: Any) -> None: ...
