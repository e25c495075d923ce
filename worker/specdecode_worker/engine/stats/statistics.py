"""Counters of the worker report: acceptance, step costs, traffic and latency.

All counters only increase while the engine runs. Callers pass the time; no function here reads a clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from specdecode_worker.contract import (
    MAX_RANKS,
    MAX_TASKS,
    OTHER_TASK,
    AcceptanceCell,
    HistogramCounts,
    LatencyHistogram,
    RequestCell,
    TaskCell,
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
    """Latency histogram. ``edges`` are inclusive upper bounds in seconds; the last of ``counts`` has no upper bound."""

    name: LatencyName
    edges: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, name: LatencyName) -> Histogram:
        """Create an empty histogram with the edges of this latency."""
        edges = tuple(edge / 1000 for edge in _MILLISECONDS[name])
        return cls(name, edges, [0] * (len(edges) + 1))

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a latency ``times`` times."""
        self.counts[bisect_left(self.edges, seconds)] += times
        self.sum += seconds * times

    def counted(self) -> HistogramCounts:
        """Return the counts and the sum."""
        return HistogramCounts(counts=tuple(self.counts), sum=self.sum)

    def cell(self) -> LatencyHistogram:
        """Return the histogram as reported."""
        return LatencyHistogram(name=self.name, edges=self.edges, counts=tuple(self.counts), sum=self.sum)


@dataclass(slots=True)
class Traffic:
    """Requests, tokens, decoding steps and latencies of one task."""

    arrivals: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    decode_steps: int = 0
    decode_tokens: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram.of("ttft"))
    itl: Histogram = field(default_factory=lambda: Histogram.of("ttit"))


class AcceptanceCategory(NamedTuple):
    """Category of acceptance counts: task, sampled or greedy, and hash of the draft."""

    task: str
    sampled: bool
    draft: str = ""


class RankCounts:
    """Ranks of the target's tokens in one category: a counter for each depth, kind of parent and rank."""

    __slots__ = ("_main", "_sibling")

    def __init__(self) -> None:
        self._main: list[list[int]] = []
        self._sibling: list[list[int]] = []

    def levels(self, depth: int, *, main: bool) -> list[list[int]]:
        """Return the counters by rank of the depths 1 to ``depth`` at least, for the caller to increase.

        Those of the main path count ranks below its nodes, the other ones ranks below all other nodes.
        """
        levels = self._main if main else self._sibling
        while len(levels) < depth:
            levels.append([0] * (MAX_RANKS + 1))
        return levels

    def cells(self) -> Iterator[tuple[int, bool, list[int]]]:
        """Return depth, whether the parent is on the main path, and counters by rank, where something was counted."""
        for main, levels in ((True, self._main), (False, self._sibling)):
            for depth, counts in enumerate(levels, start=1):
                if any(counts):
                    yield depth, main, counts


@dataclass(slots=True)
class Statistics:
    """All counters since the engine started.

    ``drafts`` and ``plain_steps`` count sequence-steps with and without draft tokens. ``running_request_seconds`` and
    ``waiting_request_seconds`` are time integrals of the number of running and waiting requests.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    plain_steps: int = 0
    running_request_seconds: float = 0.0
    waiting_request_seconds: float = 0.0
    costs: StepCosts = field(default_factory=StepCosts)
    e2e: Histogram = field(default_factory=lambda: Histogram.of("e2e"))
    queue: Histogram = field(default_factory=lambda: Histogram.of("queue"))
    _named: set[str] = field(default_factory=set)
    _ranks: dict[AcceptanceCategory, RankCounts] = field(default_factory=dict)
    _credit: dict[AcceptanceCategory, RankCounts] = field(default_factory=dict)
    _requests: dict[AcceptanceCategory, list[int]] = field(default_factory=dict)
    _traffic: dict[str, Traffic] = field(default_factory=dict)

    @property
    def ttft(self) -> Histogram:
        """Time to first token of all tasks together."""
        return _sum("ttft", [traffic.ttft for traffic in self._traffic.values()])

    @property
    def itl(self) -> Histogram:
        """Inter-token latency of all tasks together."""
        return _sum("ttit", [traffic.itl for traffic in self._traffic.values()])

    def traffic(self, task: str) -> Traffic:
        """Return the traffic counters of a task, to be updated by the caller."""
        traffic = self._traffic.get(task)
        return traffic if traffic is not None else self._traffic.setdefault(self._label(task), Traffic())

    def ranks(self, category: AcceptanceCategory) -> RankCounts:
        """Return the counters of ranks of a category, to be updated by the caller."""
        return self._rank_counts(self._ranks, category)

    def credit(self, category: AcceptanceCategory) -> RankCounts:
        """Return the counters of ranks in the own order of a merged draft, to be updated by the caller."""
        return self._rank_counts(self._credit, category)

    def record_rank(self, category: AcceptanceCategory, depth: int, *, main: bool, rank: int) -> None:
        """Count the rank of the target's token among the draft's candidates at one depth.

        Args:
            category: Category to count in.
            depth: Depth of the candidates, from 1; their parent is an accepted node of depth ``depth - 1``.
            main: True if that parent is on the main path, i.e. it and its ancestors have rank 0.
            rank: Rank of the target's token, from 0; MAX_RANKS for a miss.
        """
        self.ranks(category).levels(depth, main=main)[depth - 1][rank] += 1

    def record_draft(self, nodes: int, accepted: int) -> None:
        """Count one step of one sequence with ``nodes`` draft tokens, which may be 0 (a plain step)."""
        if nodes == 0:
            self.plain_steps += 1
            return
        self.drafts += 1
        self.draft_tokens += nodes
        self.accepted_tokens += accepted

    def record_request(self, category: AcceptanceCategory, accepted: int, drafts: int) -> None:
        """Count a finished request: sums of its accepted tokens a, its drafts d, and their squares and product."""
        sums = self._requests.setdefault(self._labelled(category), [0] * 6)
        for i, value in enumerate((1, accepted, drafts, accepted**2, accepted * drafts, drafts**2)):
            sums[i] += value

    def acceptance_cells(self, most: int) -> tuple[AcceptanceCell, ...]:
        """Return the at most ``most`` acceptance cells with the highest counts, highest first."""
        return _cells(self._ranks, most)

    def credit_cells(self, most: int) -> tuple[AcceptanceCell, ...]:
        """Return the at most ``most`` cells of `credit` with the highest counts, highest first."""
        return _cells(self._credit, most)

    def request_cells(self) -> tuple[RequestCell, ...]:
        """Return the sums over finished requests by category."""
        return tuple(
            RequestCell(draft=s.draft, task=s.task, sampled=s.sampled, n=n, a=a, d=d, aa=aa, ad=ad, dd=dd)
            for s, (n, a, d, aa, ad, dd) in self._requests.items()
        )

    def traffic_cells(self) -> tuple[TrafficCell, ...]:
        """Return the traffic counters by task."""
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
        """Return the histograms of TTFT, time between tokens, end-to-end latency and queue time."""
        return tuple(histogram.cell() for histogram in (self.ttft, self.itl, self.e2e, self.queue))

    def task_cells(self) -> tuple[TaskCell, ...]:
        """Return the latencies and decoding steps by task."""
        return tuple(
            TaskCell(
                task=task,
                ttft=traffic.ttft.counted(),
                itl=traffic.itl.counted(),
                decode_steps=traffic.decode_steps,
                decode_tokens=traffic.decode_tokens,
            )
            for task, traffic in self._traffic.items()
        )

    def _rank_counts(self, counters: dict[AcceptanceCategory, RankCounts], category: AcceptanceCategory) -> RankCounts:
        counts = counters.get(category)
        return counts if counts is not None else counters.setdefault(self._labelled(category), RankCounts())

    def _labelled(self, category: AcceptanceCategory) -> AcceptanceCategory:
        label = self._label(category.task)
        return category if label == category.task else category._replace(task=label)

    def _label(self, task: str) -> str:
        """Return the task name to count under.

        The first MAX_TASKS tasks keep their names and all later tasks count as ``other``. This bounds the size of the
        report even if plans with new tasks keep arriving.
        """
        if task in self._named:
            return task
        if task == OTHER_TASK or len(self._named) >= MAX_TASKS:
            return OTHER_TASK
        self._named.add(task)
        return task


def _cells(counters: Mapping[AcceptanceCategory, RankCounts], most: int) -> tuple[AcceptanceCell, ...]:
    """Return the at most ``most`` cells of the counters with the highest counts, highest first."""
    cells = [(category, *cell) for category, counts in counters.items() for cell in counts.cells()]
    return tuple(
        AcceptanceCell(
            draft=category.draft,
            task=category.task,
            sampled=category.sampled,
            depth=depth,
            parent="main" if main else "sibling",
            ranks=tuple(ranks),
        )
        for category, depth, main, ranks in sorted(cells, key=lambda cell: -sum(cell[-1]))[:most]
    )


def _sum(name: LatencyName, parts: Iterable[Histogram]) -> Histogram:
    """Return the sum of histograms of one latency."""
    total = Histogram.of(name)
    for part in parts:
        total.counts = [a + b for a, b in zip(total.counts, part.counts, strict=True)]
        total.sum += part.sum
    return total
