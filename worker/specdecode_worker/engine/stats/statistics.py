"""Counters behind contract.Report: what was accepted, what steps cost, what came in and went out, how long it took.

All are monotonic within a boot. Time is passed in; nothing here reads a clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal

from specdecode_worker.contract import (
    MAX_RANKS,
    MAX_TASKS,
    OTHER_TASK,
    AcceptanceCell,
    LatencyHistogram,
    RequestCell,
    TrafficCell,
)
from specdecode_worker.engine.stats.step_costs import StepCosts

LatencyName = Literal["ttft", "ttit", "e2e", "queue"]
_MILLISECONDS: dict[LatencyName, tuple[float, ...]] = {
    "ttit": (0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 25, 30, 40, 50, 75, 100, 200, 500, 1000),
    "ttft": (1, 2, 5, 10, 20, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 2000, 5000, 10000, 30000),
    "queue": (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000),
    "e2e": (10, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 30000, 60000, 120000, 300000),
}
MAX_STEP_CELLS, MAX_ACCEPTANCE_CELLS = 64, 1024


@dataclass(slots=True)
class Histogram:
    """Counts per bucket; edges in seconds, upper and inclusive."""

    name: LatencyName
    edges: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, name: LatencyName) -> Histogram:
        edges = tuple(edge / 1000 for edge in _MILLISECONDS[name])
        return cls(name, edges, [0] * (len(edges) + 1))

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.edges, seconds)] += times
        self.sum += seconds * times

    def cell(self) -> LatencyHistogram:
        return LatencyHistogram(name=self.name, edges=self.edges, counts=tuple(self.counts), sum=self.sum)


@dataclass(slots=True)
class Traffic:
    arrivals: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sort:
    """What acceptance is told apart by. ``draft`` is the hash of the one that was asked."""

    task: str
    sampled: bool
    draft: str = ""


@dataclass(slots=True)
class Statistics:
    """Everything of one boot."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    plain_steps: int = 0
    running_request_seconds: float = 0.0
    waiting_request_seconds: float = 0.0
    costs: StepCosts = field(default_factory=StepCosts)
    ttft: Histogram = field(default_factory=lambda: Histogram.of("ttft"))
    ttit: Histogram = field(default_factory=lambda: Histogram.of("ttit"))
    e2e: Histogram = field(default_factory=lambda: Histogram.of("e2e"))
    queue: Histogram = field(default_factory=lambda: Histogram.of("queue"))
    _named: set[str] = field(default_factory=set)
    _ranks: Counter[tuple[Sort, int, bool, int]] = field(default_factory=Counter)
    _requests: dict[Sort, list[int]] = field(default_factory=dict)
    _traffic: dict[str, Traffic] = field(default_factory=dict)

    def traffic(self, task: str) -> Traffic:
        return self._traffic.setdefault(self._label(task), Traffic())

    def rank(self, sort: Sort, depth: int, *, main: bool, rank: int) -> None:
        """The target's token behind an accepted node of depth ``depth - 1`` had this rank; MAX_RANKS is a miss."""
        self._ranks[self._labelled(sort), depth, main, rank] += 1

    def drafted(self, nodes: int, accepted: int) -> None:
        """A sequence-step with a draft of ``nodes`` tokens, or none."""
        if nodes == 0:
            self.plain_steps += 1
            return
        self.drafts += 1
        self.draft_tokens += nodes
        self.accepted_tokens += accepted

    def finished(self, sort: Sort, accepted: int, drafts: int) -> None:
        """A request ended: the sums of its accepted tokens a and its drafts d."""
        sums = self._requests.setdefault(self._labelled(sort), [0] * 6)
        for i, value in enumerate((1, accepted, drafts, accepted**2, accepted * drafts, drafts**2)):
            sums[i] += value

    def acceptance_cells(self, most: int) -> tuple[AcceptanceCell, ...]:
        """The cells with most counts, since a report is bounded."""
        cells: dict[tuple[Sort, int, bool], list[int]] = {}
        for (sort, depth, main, rank), count in self._ranks.items():
            cells.setdefault((sort, depth, main), [0] * (MAX_RANKS + 1))[rank] += count
        return tuple(
            AcceptanceCell(
                draft=sort.draft,
                task=sort.task,
                sampled=sort.sampled,
                depth=depth,
                parent="main" if main else "sibling",
                ranks=tuple(ranks),
            )
            for (sort, depth, main), ranks in sorted(cells.items(), key=lambda item: -sum(item[1]))[:most]
        )

    def request_cells(self) -> tuple[RequestCell, ...]:
        return tuple(
            RequestCell(draft=s.draft, task=s.task, sampled=s.sampled, n=n, a=a, d=d, aa=aa, ad=ad, dd=dd)
            for s, (n, a, d, aa, ad, dd) in self._requests.items()
        )

    def traffic_cells(self) -> tuple[TrafficCell, ...]:
        return tuple(
            TrafficCell(
                task=task,
                arrivals=traffic.arrivals,
                finished=traffic.finished,
                prompt_tokens=traffic.prompt_tokens,
                cached_tokens=traffic.cached_tokens,
                output_tokens=traffic.output_tokens,
            )
            for task, traffic in self._traffic.items()
        )

    def latency_cells(self) -> tuple[LatencyHistogram, ...]:
        return tuple(histogram.cell() for histogram in (self.ttft, self.ttit, self.e2e, self.queue))

    def _labelled(self, sort: Sort) -> Sort:
        return replace(sort, task=self._label(sort.task))

    def _label(self, task: str) -> str:
        """Plans come and go, a report is bounded: the first tasks keep their names, all later ones are ``other``."""
        if task != OTHER_TASK and len(self._named) < MAX_TASKS:
            self._named.add(task)
        return task if task in self._named else OTHER_TASK
