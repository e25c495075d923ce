"""Statistics of steps: acceptance, times and traffic, and the report that the operator reads."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdecode_worker.contract import (
    FEATURES,
    MAX_DEPTH,
    MAX_RANKS,
    MAX_REPORT_BYTES,
    MAX_TASKS,
    OTHER_TASK,
    AcceptanceCell,
    ContextCell,
    LatencyHistogram,
    MemoryState,
    PhaseSeconds,
    Report,
    RequestCell,
    StepCell,
    TaskCell,
    TrafficCell,
)
from specdecode_worker.control.plan import ShadowDraft, scores
from specdecode_worker.core.messages import Logprobs
from specdecode_worker.core.request import Request, Row
from specdecode_worker.drafts.registry import Credit
from specdecode_worker.drafts.swap import BlockCosts

# Timer of the phases of a step.
#
# On an accelerator, the time that the host waits for the device counts as verify.

Phase = Literal["draft", "verify", "sample", "bookkeeping"]


class PhaseTimer:
    """Accumulated seconds by phase since the engine started."""

    def __init__(self) -> None:
        self._seconds: dict[Phase, float] = {"draft": 0.0, "verify": 0.0, "sample": 0.0, "bookkeeping": 0.0}
        self._at = 0.0

    def start(self) -> None:
        """Start timing the first phase."""
        self._at = time.monotonic()

    def lap(self, phase: Phase) -> float:
        """Add the time since the last call of `start` or `lap` to ``phase``, and return it in seconds."""
        now = time.monotonic()
        lasted, self._at = now - self._at, now
        self._seconds[phase] += lasted
        return lasted

    @property
    def seconds(self) -> PhaseSeconds:
        """Accumulated seconds by phase, as reported."""
        return PhaseSeconds(**self._seconds)


# Step cost cells: sums from which the operator fits its step time model. See contract.StepCell.

CLIP = 4.0
"""Multiple of the running median of a cell at which step times are clipped. Slower steps are due to other load."""
_REMEMBERED = 31
"""Number of recent step times over which the median is taken."""
_LEAST_FOR_CLIP = 8
"""Number of step times of a cell before clipping starts."""

_MOST_PENDING = 64
"""Number of steps that are added to the sums together, because one by one takes 5 us a step."""
_UPPER = np.triu_indices(len(FEATURES))
"""Rows and columns of a symmetric matrix that StepCell lists, row by row."""

CellKey = tuple[int, int, bool, int]
"""Key of a cell: (bucket of packed tokens, draft passes, has prefill, context bucket)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """Features of a step, in the order of contract.FEATURES without its first entry, the constant 1."""

    sequences: int
    verify_tokens: int
    kv_tokens: int
    draft_passes: int
    prefill_tokens: int

    def cell_key(self, context_bucket: int) -> CellKey:
        """Return the key of the cell of this step."""
        tokens = self.verify_tokens + self.prefill_tokens
        return 1 << max(tokens - 1, 0).bit_length(), self.draft_passes, self.prefill_tokens > 0, context_bucket

    @property
    def x(self) -> tuple[float, ...]:
        """Feature vector in the order of contract.FEATURES, the constant 1 included."""
        return 1, self.sequences, self.verify_tokens, self.kv_tokens, self.draft_passes, self.prefill_tokens


@dataclass(slots=True)
class _Sums:
    """Sums of one cell, named as in contract.StepCell; ``recent`` holds the latest step times for the median.

    ``x``, ``xx`` and ``xt`` are without the steps in ``pending``, the feature vectors and times of the latest ones.
    """

    count: int = 0
    x: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(FEATURES)))
    xx: NDArray[np.float64] = field(default_factory=lambda: np.zeros((len(FEATURES), len(FEATURES))))
    xt: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(FEATURES)))
    pending: list[tuple[float, ...]] = field(default_factory=list)
    t: float = 0.0
    tt: float = 0.0
    wall_seconds: float = 0.0
    clipped: int = 0
    emitted: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def add(self, size: StepSize, emitted: int, wall_seconds: float) -> None:
        seconds = self._clip(wall_seconds)
        self.pending.append((*size.x, seconds))
        if len(self.pending) >= _MOST_PENDING:
            self.add_pending()
        self.count += 1
        self.t += seconds
        self.tt += seconds * seconds
        self.wall_seconds += wall_seconds
        self.emitted += emitted

    def add_pending(self) -> None:
        """Add the pending steps to the sums."""
        if self.pending:
            table = np.array(self.pending)
            x, seconds = table[:, :-1], table[:, -1]
            self.x += x.sum(axis=0)
            self.xx += x.T @ x
            self.xt += x.T @ seconds
            self.pending.clear()

    def _clip(self, seconds: float) -> float:
        bound = CLIP * median(self.recent) if len(self.recent) >= _LEAST_FOR_CLIP else seconds
        self.recent.append(seconds)
        self.clipped += seconds > bound
        return min(seconds, bound)


class StepCosts:
    """Step cost sums of a worker, by cell."""

    def __init__(self) -> None:
        self._cells: dict[CellKey, _Sums] = {}

    def add(self, context_bucket: int, size: StepSize, emitted: int, wall_seconds: float) -> None:
        """Add one step to its cell. ``emitted`` is the number of tokens that the step emitted."""
        key = size.cell_key(context_bucket)
        self._cells[key] = sums = self._cells.pop(key, None) or _Sums()  # the cell of the latest step is the last one
        sums.add(size, emitted, wall_seconds)

    def cells(self, most: int) -> tuple[StepCell, ...]:
        """Return the at most ``most`` cells with the latest steps, sorted by key. The report size is limited.

        By their number of steps, a shape that begins to run would stay behind those of weeks, and seem never timed.
        """
        latest = [*reversed(self._cells)][:most]
        return tuple(_cell(cell_key, self._cells[cell_key]) for cell_key in sorted(latest))


def _cell(cell_key: CellKey, sums: _Sums) -> StepCell:
    sums.add_pending()
    return StepCell(
        tokens_bucket=cell_key[0],
        draft_passes=cell_key[1],
        prefill=cell_key[2],
        context_bucket=cell_key[3],
        count=sums.count,
        x=_short(sums.x),
        xx=_short(sums.xx[_UPPER]),
        xt=_short(sums.xt),
        t=sums.t,
        tt=sums.tt,
        # Device time equals wall time on a CPU, and as long as no step is queued behind another.
        device_seconds=sums.wall_seconds,
        wall_seconds=sums.wall_seconds,
        clipped=sums.clipped,
        emitted=sums.emitted,
    )


def _short(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Round to 10 significant digits.

    This keeps the report small, and differences between two reports accurate enough.
    """
    return tuple(float(f"{value:.10g}") for value in values.tolist())


# Counters of the worker report: acceptance, step costs, traffic and latency.
#
# All counters only increase while the engine runs. Callers pass the time; no function here reads a clock.

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


@dataclass(slots=True)
class Traffic:
    """Requests, tokens, decoding steps, drafts and latencies of one task, named as in TrafficCell and TaskCell."""

    task: str
    arrivals: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    decode_steps: int = 0
    decode_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram.of("ttft"))
    itl: Histogram = field(default_factory=lambda: Histogram.of("ttit"))


class AcceptanceCategory(NamedTuple):
    """Category of acceptance counts: task, sampled or greedy, and hash of the draft."""

    task: str
    sampled: bool
    draft: str = ""


class RankCounts:
    """Ranks of the target's tokens in one category: a counter for each depth, kind of parent and rank."""

    __slots__ = ("_levels", "contexts")

    def __init__(self) -> None:
        self._levels: dict[bool, list[list[int]]] = {True: [], False: []}
        """Counters of each depth, by whether the parent is on the main path."""
        self.contexts: dict[int, list[int]] = {}
        """First draft tokens of each context bucket, and how many were accepted."""

    def add_first(self, context: int, *, accepted: bool) -> None:
        """Count a first draft token in a context bucket."""
        sums = self.contexts.get(context)
        if sums is None:
            sums = self.contexts[context] = [0, 0]
        sums[0] += 1
        sums[1] += accepted

    def levels(self, depth: int, *, main: bool) -> list[list[int]]:
        """Return the counters by rank of the depths 1 to ``depth`` at least, for the caller to increase.

        Those of the main path count ranks below its nodes, the other ones ranks below all other nodes.
        """
        levels = self._levels[main]
        while len(levels) < depth:
            levels.append([0] * (MAX_RANKS + 1))
        return levels

    def cells(self) -> Iterator[tuple[int, bool, list[int]]]:
        """Return depth, whether the parent is on the main path, and counters by rank, where something was counted."""
        for main, levels in self._levels.items():
            for depth, counts in enumerate(levels, start=1):
                if any(counts):
                    yield depth, main, counts


@dataclass(slots=True)
class Statistics:
    """All counters since the engine started.

    ``plain_steps`` counts sequence-steps without draft tokens. ``running_request_seconds`` and
    ``waiting_request_seconds`` are time integrals of the number of running and waiting requests.
    """

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
        if (traffic := self._traffic.get(task)) is not None:
            return traffic
        label = self._label(task)
        return self._traffic.setdefault(label, Traffic(label))

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

    def record_draft(self, traffic: Traffic, nodes: int, accepted: int) -> None:
        """Count one step of one sequence with ``nodes`` draft tokens, which may be 0 (a plain step)."""
        if nodes == 0:
            self.plain_steps += 1
            return
        traffic.drafts += 1
        traffic.draft_tokens += nodes
        traffic.accepted_tokens += accepted

    def record_request(self, category: AcceptanceCategory, accepted: int, drafts: int) -> None:
        """Count a finished request: sums of its accepted tokens a, its drafts d, and their squares and product."""
        sums = self._requests.setdefault(self._labelled(category), [0] * 6)
        for i, value in enumerate((1, accepted, drafts, accepted**2, accepted * drafts, drafts**2)):
            sums[i] += value

    def acceptance_cells(self, most: int, drafts: Collection[str] = ()) -> tuple[AcceptanceCell, ...]:
        """Return the at most ``most`` acceptance cells with the highest counts, highest first.

        Those of ``drafts``, the hashes of the drafts that run, come before those of drafts that are gone.
        """
        return _cells(self._ranks, most, drafts)

    def credit_cells(self, most: int, drafts: Collection[str] = ()) -> tuple[AcceptanceCell, ...]:
        """Return the at most ``most`` cells of `credit`, in the order of `acceptance_cells`."""
        return _cells(self._credit, most, drafts)

    def context_cells(self, most: int, drafts: Collection[str] = ()) -> tuple[ContextCell, ...]:
        """Return the at most ``most`` cells of first draft tokens by context, in the order of `acceptance_cells`.

        Greedy and sampled tokens are counted together.
        """
        sums: dict[tuple[str, str, int], tuple[int, int]] = {}
        for category, counts in self._ranks.items():
            for context, (total, hits) in counts.contexts.items():
                key = category.draft, category.task, context
                others = sums.get(key, (0, 0))
                sums[key] = others[0] + total, others[1] + hits
        order = sorted(sums.items(), key=lambda item: (item[0][0] not in drafts, -item[1][0]))
        return tuple(
            ContextCell(draft=draft, task=task, context=context, total=total, hits=hits)
            for (draft, task, context), (total, hits) in order[:most]
        )

    def request_cells(self) -> tuple[RequestCell, ...]:
        """Return the sums over finished requests by category."""
        return tuple(
            RequestCell(**category._asdict(), n=n, a=a, d=d, aa=aa, ad=ad, dd=dd)
            for category, (n, a, d, aa, ad, dd) in self._requests.items()
        )

    def traffic_cells(self) -> tuple[TrafficCell, ...]:
        """Return the traffic counters by task."""
        return tuple(TrafficCell.model_validate(one, from_attributes=True) for one in self._traffic.values())

    def latency_cells(self) -> tuple[LatencyHistogram, ...]:
        """Return the histograms of TTFT, time between tokens, end-to-end latency and queue time."""
        histograms = (self.ttft, self.itl, self.e2e, self.queue)
        return tuple(LatencyHistogram.model_validate(one, from_attributes=True) for one in histograms)

    def task_cells(self) -> tuple[TaskCell, ...]:
        """Return the latencies, decoding steps and drafts by task."""
        return tuple(TaskCell.model_validate(one, from_attributes=True) for one in self._traffic.values())

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


def _cells(
    counters: Mapping[AcceptanceCategory, RankCounts], most: int, drafts: Collection[str]
) -> tuple[AcceptanceCell, ...]:
    """Return the at most ``most`` cells of the counters, in the order of `Statistics.acceptance_cells`."""
    cells = [(category, *cell) for category, counts in counters.items() for cell in counts.cells()]
    cells.sort(key=lambda cell: (cell[0].draft not in drafts, -sum(cell[-1])))
    return tuple(
        AcceptanceCell(
            **category._asdict(),
            depth=depth,
            parent="main" if main else "sibling",
            ranks=tuple(ranks),
        )
        for category, depth, main, ranks in cells[:most]
    )


def _sum(name: LatencyName, parts: Iterable[Histogram]) -> Histogram:
    """Return the sum of histograms of one latency."""
    total = Histogram.of(name)
    for part in parts:
        total.counts = [a + b for a, b in zip(total.counts, part.counts, strict=True)]
        total.sum += part.sum
    return total


# Recorder of collected steps: acceptance ranks, shadow scores, step costs and latencies.


@dataclass(slots=True)
class RowResult:
    """Results of one row, read by the host. Not frozen, because that would double the time to create one.

    ``tokens`` are the emitted tokens, ``path`` the accepted nodes after the root, and ``ranks`` the rank of each
    emitted token among the draft's candidates: MAX_RANKS for a miss, negative if nothing was ranked. ``depth_limit`` is
    the maximum accepted depth, which synthetic knobs may limit.
    """

    tokens: list[int]
    path: list[int]
    ranks: list[int]
    depth_limit: int
    ranked_NK: list[list[int]] | None = None
    """Ranked draft tokens of each node, if the row drafted shadow nodes (drafted but not verified)."""
    logprobs: tuple[Logprobs, ...] = ()
    """Log probabilities of each token, if requested."""
    credits: tuple[Credit, ...] = ()
    """Ranks of the tokens in the order of each draft, if the row's task merges drafts."""


class StepRecorder:
    """Recorder that updates Statistics. It stores shadow drafts until the tokens to score them have been emitted."""

    def __init__(self, statistics: Statistics) -> None:
        self.statistics = statistics
        self.block: BlockCosts | None = None
        """Costs of the block of a draft trial that runs; None without one."""
        self.context = 0
        """Context bucket of the step whose rows are recorded."""
        self._shadows: dict[str, list[ShadowDraft]] = {}

    def record_arrival(self, request: Request) -> None:
        """Count the arrival of a request. One that continues an earlier attempt has arrived there."""
        if request.is_continued:
            return
        traffic = self.statistics.traffic(request.submit.task)
        traffic.arrivals += 1
        traffic.prompt_tokens += len(request.submit.prompt)

    def record_admission(self, request: Request, now: float) -> None:
        """Record the queue time and cached tokens of a request at its first chunk. Re-admission does not count."""
        if request.epoch == 0 and not request.is_continued:
            self.statistics.queue.add(now - request.arrived_seconds)
            self.statistics.traffic(request.submit.task).cached_tokens += request.cached_tokens

    def admit_to_block(self, request: Request) -> None:
        """Make a request that starts to run a member of the block of a draft trial, unless it has run before."""
        if self.block is not None and request.epoch == int(bool(request.submit.emitted)):
            self.block.admit(request.id)

    def record_row(self, row: Row, result: RowResult, taken: list[int], now: float) -> None:
        """Record a row that emitted tokens. ``taken`` are those that count; tokens after a stop are dropped."""
        request = row.request
        traffic = self.statistics.traffic(request.submit.task)
        if not row.is_chunk:
            traffic.decode_steps += 1
            traffic.decode_tokens += len(result.tokens)
            if not row.tree.given:
                self.statistics.record_draft(traffic, row.tree.verified - 1, len(result.tokens) - 1)
            if self.block is not None:
                self.block.add_row(request.id, request.submit.task, len(taken))
            if result.path or result.ranks[0] >= 0:  # else a plain step, in which nothing was ranked
                self._count_ranks(row, result, len(taken))
            if result.ranked_NK is not None:
                self._store_shadow(row, result, result.ranked_NK)
        self._count_latency(request, traffic, len(taken), now)
        traffic.output_tokens += len(taken)
        if self._shadows:
            self._score_shadows(request)

    def record_end(self, request: Request, now: float) -> None:
        """Record the end of a request. Only requests that finished normally are counted.

        The latency of a request that continues an earlier attempt is unknown.
        """
        self._shadows.pop(request.id, None)
        if self.block is not None:
            self.block.end_request(request.id, emitted=request.generated > 0)
        if request.finish not in ("stop", "length"):
            return
        self.statistics.record_request(category_of(request), request.accepted, request.drafts)
        if not request.is_continued:
            self.statistics.e2e.add(now - request.arrived_seconds)
        self.statistics.traffic(request.submit.task).finished += 1

    def record_block_step(self, concurrency: int, context: int, seconds: float) -> None:
        """Add the duration of a step to the block of a draft trial, with the buckets that the step ran in."""
        if self.block is not None:
            self.block.end_step(concurrency, context, seconds)

    def _count_ranks(self, row: Row, result: RowResult, taken: int) -> None:
        """Count up to MAX_DEPTH, which is all that a report has; the trees of a plan may be deeper."""
        category, end = category_of(row.request), min(len(result.tokens), taken, MAX_DEPTH)
        counts = self.statistics.ranks(category)
        if end and result.ranks[0] >= 0:
            counts.add_first(self.context, accepted=result.ranks[0] == 0)
        _count(counts, row, result, result.ranks[:end])
        for credit in result.credits:
            own = self.statistics.credit(category._replace(draft=credit.hash))
            _count(own, row, result, credit.ranks[:end])

    def _store_shadow(self, row: Row, result: RowResult, ranked_NK: list[list[int]]) -> None:
        # The request already includes the tokens of this step, so its root is that many tokens back.
        root = row.request.cached - len(result.tokens)
        ranked = tuple(tuple(ranked_NK[node]) for node in row.tree.main_path[:-1])
        shadow = ShadowDraft(root, ranked, row.tree.main_depth + 1, result.depth_limit)
        self._shadows.setdefault(row.request.id, []).append(shadow)

    def _score_shadows(self, request: Request) -> None:
        shadows = self._shadows.get(request.id)
        if not shadows:
            return
        pending = []
        for shadow in shadows:
            shadow_scores = scores(shadow, request.tokens)
            if shadow_scores is None:
                pending.append(shadow)
                continue
            for score in shadow_scores:
                self.statistics.record_rank(category_of(request), score.depth, main=True, rank=score.rank)
        self._shadows[request.id] = pending

    @staticmethod
    def _count_latency(request: Request, traffic: Traffic, tokens: int, now: float) -> None:
        if request.generated == tokens:  # The first tokens after a change of workers have no predecessor here.
            if not request.is_continued:
                traffic.ttft.add(now - request.arrived_seconds)
        elif tokens:
            traffic.itl.add((now - request.last_emit_seconds) / tokens, tokens)
        request.last_emit_seconds = now


def _count(counts: RankCounts, row: Row, result: RowResult, ranks: Sequence[int]) -> None:
    """Count the ranks of a row's tokens, by depth and by whether their parent is on the main path."""
    if not ranks or (ranks[0] < 0 and max(ranks) < 0):
        return
    main, tree_ranks = True, row.tree.ranks
    levels = counts.levels(len(ranks), main=True)
    for level, rank in enumerate(ranks):
        if level and main and tree_ranks[result.path[level - 1]]:
            main, levels = False, counts.levels(len(ranks), main=False)
        if rank >= 0:
            levels[level][rank] += 1


def category_of(request: Request) -> AcceptanceCategory:
    """Return the category in which the acceptance of the request is counted."""
    return AcceptanceCategory(request.submit.task, not request.sampling_params.greedy, request.draft.draft)


def step_size_of(rows: Sequence[Row], draft_passes: int) -> StepSize:
    """Return the features of a step. Call it before the step is collected, which changes the lengths."""
    sequences = verify = keys = prefill = 0
    for row in rows:
        keys += row.request.cached
        sequences += row.emits
        if row.is_chunk:
            prefill += row.count
        else:
            verify += row.count
    return StepSize(
        sequences=sequences,
        verify_tokens=verify,
        kv_tokens=keys,
        draft_passes=draft_passes,
        prefill_tokens=prefill,
    )


# Builder of the worker report (contract.Report), within its size limit.

_SERVER_FIELD_BYTES = 64
"""Bytes that the server process may add to the report: the compatibility key, and ``draining``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Properties of a worker that do not change while its engine runs."""

    boot_id: str
    worker: str
    model: str
    target: str
    max_num_seqs: int
    memory: MemoryState | None = None


def build_report(state: Report, statistics: Statistics) -> Report:
    """Return the report of a worker in this state with its statistics, in at most MAX_REPORT_BYTES bytes of JSON.

    If the report is too large, the step cells that ran least recently are left out, and the acceptance cells of drafts
    that are gone, or with the lowest counts. Their counters continue, so a later report can include them again.
    """
    share, most_bytes = 1, MAX_REPORT_BYTES - _SERVER_FIELD_BYTES
    tasks, drafts = statistics.task_cells(), {state.draft.hash, *(draft.hash for draft in state.named_drafts)}
    while True:
        counted = {
            "running_request_seconds": statistics.running_request_seconds,
            "waiting_request_seconds": statistics.waiting_request_seconds,
            "drafts": sum(cell.drafts for cell in tasks),
            "draft_tokens": sum(cell.draft_tokens for cell in tasks),
            "accepted_tokens": sum(cell.accepted_tokens for cell in tasks),
            "plain_steps": statistics.plain_steps,
            "acceptance": statistics.acceptance_cells(MAX_ACCEPTANCE_CELLS // share, drafts),
            "credit": statistics.credit_cells(MAX_ACCEPTANCE_CELLS // share, drafts),
            "contexts": statistics.context_cells(MAX_STEP_CELLS // share, drafts),
            "requests": statistics.request_cells(),
            "steps": statistics.costs.cells(MAX_STEP_CELLS // share),
            "traffic": statistics.traffic_cells(),
            "latency": statistics.latency_cells(),
            "tasks": tasks,
        }
        report = state.model_copy(update=counted)
        if len(report.model_dump_json().encode()) <= most_bytes or share > MAX_ACCEPTANCE_CELLS:
            return report
        share *= 2
