"""Bounds, draft trees, acceptance rates and requests of tasks, all without I/O."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from specdecode_operator.api.v1alpha1 import ObjectiveSpec, SpeculationSpec, TaskDepthSpec, TaskSpec
from specdecode_operator.planning.estimates import TUNING, Estimate, Load, StepTimeModel
from specdecode_operator.state.learned import LearnedState, RowState
from specdecode_operator.telemetry.counters import (
    NO_HITS,
    NO_REQUESTS,
    NO_TRAFFIC,
    Hits,
    Moments,
    RequestSums,
    TrafficSums,
)
from specdecode_worker.contract import (
    DRAFT_FREE,
    FEATURES,
    OTHER_TASK,
    EngineConfig,
    LatencyHistogram,
    Method,
    Report,
    TreeShape,
    draft_passes,
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one task's shapes. Plain decoding is allowed if ``least`` is 0."""

    least: int
    most: int
    initial: int
    max_nodes: int
    top_k: int
    methods: tuple[Method, ...] = ("eagle3",)
    """Methods of the task's draft and of the drafts with passes that are merged with it."""

    def passes(self, depth: int) -> int:
        """Return the draft passes of a tree of this depth."""
        return sum(draft_passes(method, depth) for method in self.methods)

    def nearest(self, shape: TreeShape) -> TreeShape:
        """Return ``shape`` if it is within the bounds, else the chain of the nearest depth."""
        allowed = self.least <= shape.depth <= self.most and shape.nodes <= self.max_nodes
        if allowed and (shape.is_chain or max(shape.ranks) < self.top_k):
            return shape
        return TreeShape.chain(max(self.least, min(self.most, shape.depth)))


def plans(speculation: SpeculationSpec) -> bool:
    """Return whether rows are planned: by the mode, or because a task of a static deployment is not static."""
    if speculation.method == "none" or speculation.mode == "Off":
        return False
    return speculation.mode != "Static" or any(task.mode or task.depth for task in speculation.tasks)


def follows(speculation: SpeculationSpec) -> bool:
    """Return whether the plan is applied. In Advisory mode it is only reported."""
    return plans(speculation) and speculation.mode != "Advisory"


def bounds_of(speculation: SpeculationSpec, name: str) -> Bounds:
    """Return the bounds of a task or of ``other``: its own fields, completed by those of the deployment."""
    task = _task(speculation, name)
    mode = task.mode or ("Static" if speculation.mode == "Static" else "Auto")
    least, most, initial = _depths(speculation, task.depth or TaskDepthSpec())
    tree, methods = speculation.tree, {draft.name: draft.method for draft in speculation.drafts}
    merged = (methods[one.draft] for one in task.merge)
    used = methods.get(task.draft or "", speculation.method), *(one for one in merged if one not in DRAFT_FREE)
    if "Off" in (mode, speculation.mode) or speculation.method == "none":
        return Bounds(0, 0, 0, tree.max_nodes, 1, used)
    if mode == "Static":
        return Bounds(initial, initial, initial, tree.max_nodes, 1, used)
    return Bounds(least, most, initial, tree.max_nodes, tree.top_k, used)


def has_own(speculation: SpeculationSpec, name: str) -> bool:
    """Return whether the spec says more of the task than its name. It then has rows before it is ever seen."""
    task = _task(speculation, name)
    return task.mode is not None or task.depth is not None


def names(speculation: SpeculationSpec) -> tuple[str, ...]:
    """Return ``other`` and the tasks of the spec."""
    return (OTHER_TASK, *(task.name for task in speculation.tasks if task.name != OTHER_TASK))


def _task(speculation: SpeculationSpec, name: str) -> TaskSpec:
    return next((task for task in speculation.tasks if task.name == name), TaskSpec(name=name))


def _depths(speculation: SpeculationSpec, own: TaskDepthSpec) -> tuple[int, int, int]:
    """Return (least, most, initial). A field of the task wins, and fields of the deployment give way to it."""
    general = speculation.depth
    given = [depth for depth in (own.min, own.initial, own.max) if depth is not None]
    most = own.max if own.max is not None else max([general.max, *given])
    most = min(most, speculation.tree.max_nodes)
    least = min(most, own.min if own.min is not None else min([general.min, *given]))
    initial = own.initial if own.initial is not None else speculation.initial
    return least, most, max(least, min(most, initial))


# Draft trees of one task: how likely each node is accepted, and the best nodes of a given depth.
#
# A node's survival is the product of the acceptance rates along its path. It never rises from a parent to a child, so
# the likeliest nodes are always a tree.

Path = tuple[int, ...]
"""Ranks from the root down to a node."""
Position = tuple[int, bool, int]
"""Depth, whether the parent is on the main path (rank 0 all along), and rank: what an acceptance rate depends on."""


class Node(NamedTuple):
    """A node that may be drafted. Likeliest first; a parent comes before its children, a better rank before others."""

    minus_survival: float
    depth: int
    path: Path

    @property
    def survival(self) -> float:
        return -self.minus_survival


@dataclass(frozen=True, slots=True, eq=False)
class TaskAcceptance:
    """Acceptance rates of one task by depth (first index) and rank (second). They never rise with the rank."""

    main: tuple[tuple[Estimate, ...], ...]
    """After a parent on the main path."""
    sibling: tuple[tuple[Estimate, ...], ...]
    """After another parent."""

    def rate(self, position: Position) -> Estimate:
        """Return the acceptance rate at a position, given that the parent was accepted."""
        depth, is_main, rank = position
        return (self.main if is_main else self.sibling)[depth - 1][rank]

    def at_odds(self, factor: float, variance: float) -> TaskAcceptance:
        """Return the rates with the odds of first choices times ``factor``, whose logarithm has this variance.

        Later ranks keep their share of the misses.
        """

        def moved(ranks: tuple[Estimate, ...]) -> tuple[Estimate, ...]:
            first = ranks[0]
            mean = factor * first.odds / (1 + factor * first.odds)
            own = first.variance / (first.mean * (1 - first.mean)) ** 2
            found = [first._replace(mean=mean, variance=max(own, variance) * (mean * (1 - mean)) ** 2)]
            left = (1 - mean) / (1 - first.mean)
            for rate in ranks[1:]:
                found.append(
                    rate._replace(mean=min(found[-1].mean, left * rate.mean), variance=left**2 * rate.variance)
                )
            return tuple(found)

        return TaskAcceptance(tuple(map(moved, self.main)), tuple(map(moved, self.sibling)))

    def has(self, position: Position) -> bool:
        """Return whether a rate is known at a position."""
        depth, is_main, rank = position
        levels = self.main if is_main else self.sibling
        return depth <= len(levels) and rank < len(levels[depth - 1])

    def survival(self, path: Path) -> float:
        """Return the probability that the node at the end of ``path`` is accepted."""
        return math.prod(self.rate(position).mean for position in positions(path))

    @lru_cache(maxsize=1000)  # noqa: B019 - bounded, of estimates that live as long as a poll
    def tokens(self, shape: TreeShape) -> float:
        """Return the expected tokens of one step."""
        return 1 + sum(map(self.survival, paths_of(shape)))

    @lru_cache(maxsize=1000)  # noqa: B019 - bounded, of estimates that live as long as a poll
    def slopes(self, shape: TreeShape) -> Mapping[Position, float]:
        """Return the derivative of log(tokens) by every acceptance rate that the shape depends on."""
        found: defaultdict[Position, float] = defaultdict(float)
        for path in paths_of(shape):
            share = self.survival(path) / self.tokens(shape)
            for position in positions(path):
                found[position] += share / self.rate(position).mean
        return found

    @lru_cache(maxsize=1000)  # noqa: B019 - bounded, of estimates that live as long as a poll
    def best_nodes(self, depth: int, top_k: int, most: int) -> tuple[Node, ...]:
        """Return the ``most`` likeliest nodes down to ``depth``, likeliest first. Every prefix is a tree."""
        found, reachable = list[Node](), [Node(-1.0, 0, ())]
        while reachable and len(found) <= most:
            node = heappop(reachable)
            found.append(node)
            if node.depth < depth:
                for child in self._children(node, top_k):
                    heappush(reachable, child)
        return tuple(found[1:])

    def _children(self, parent: Node, top_k: int) -> Iterator[Node]:
        rates = (self.sibling if any(parent.path) else self.main)[parent.depth]
        for rank, rate in enumerate(rates[:top_k]):
            yield Node(parent.minus_survival * rate.mean, parent.depth + 1, (*parent.path, rank))


def positions(path: Path) -> Iterable[Position]:
    """Return the positions along a path, whose acceptance rates its survival is the product of."""
    return ((depth, not any(path[: depth - 1]), rank) for depth, rank in enumerate(path, start=1))


@lru_cache
def chain_of(depth: int) -> TreeShape:
    """Return the chain of ``depth``, cached because shapes are validated."""
    return TreeShape.chain(depth)


@lru_cache
def paths_of(shape: TreeShape) -> tuple[Path, ...]:
    """Return the path of every node, in the order of the shape."""
    found: list[Path] = [()]
    for node, parent in enumerate(shape.parents, start=1):
        found.append((*found[parent], shape.ranks[node]))
    return tuple(found[1:])


@lru_cache(maxsize=1000)
def shape_of(paths: frozenset[Path]) -> TreeShape:
    """Return the tree of these nodes, breadth first, siblings by rank."""
    order: list[Path] = sorted(paths, key=lambda path: (len(path), path))
    index = {(): 0, **{path: number for number, path in enumerate(order, start=1)}}
    return TreeShape(tuple(index[path[:-1]] for path in order))


# Posterior of the acceptance rate of a drafted token, by task, depth, main path or sibling, and rank.


@dataclass(frozen=True, slots=True)
class AcceptanceModel:
    """Acceptance of every task, from the counts of one deployment.

    A Beta posterior for each depth, whose prior is the depth above; that of a task's is all tasks together.
    """

    learned: LearnedState
    speculation: SpeculationSpec
    cache: dict[tuple[str, int | None], TaskAcceptance] = field(default_factory=dict)

    def of(self, task: str, context: int | None = None) -> TaskAcceptance:
        """Return the acceptance of one task, in one context bucket. Without tasks in the spec, ``other`` is all."""
        if (task, context) not in self.cache:
            bounds = bounds_of(self.speculation, task)
            name = None if task == OTHER_TASK and not self.speculation.tasks else task
            rates = task_acceptance(self.learned, name, bounds.most, bounds.top_k)
            shift = context_odds(self.learned, name, context, rates) if context is not None else None
            self.cache[task, context] = rates if shift is None else rates.at_odds(*shift)
        return self.cache[task, context]


def context_odds(
    learned: LearnedState, task: str | None, context: int, rates: TaskAcceptance
) -> tuple[float, float] | None:
    """Return by what factor the odds of acceptance differ in a context, and the variance of its logarithm.

    One factor holds for all depths and ranks: deeper tokens are too seldom in a long context. None where all tokens
    are of one context. Task None is all tasks together.
    """
    cells = [cell for cell in learned.contexts if task in (None, cell.task)]
    if not rates.main or not any(cell.context != context and cell.total >= TUNING.min_samples for cell in cells):
        return None
    mean, effect = rates.main[0][0].mean, design_effect(learned, task)
    counts = reduce(Hits.plus, (Hits(c.hits, c.total) for c in cells if c.context == context), NO_HITS)
    own = _posterior(counts, mean, TUNING.task_prior_drafts, effect)
    return own.odds / rates.main[0][0].odds, own.variance / (own.mean * (1 - own.mean)) ** 2


def task_acceptance(learned: LearnedState, task: str | None, depth: int, top_k: int = 1) -> TaskAcceptance:
    """Return the acceptance down to ``depth`` for ranks below ``top_k``. Task None is all tasks together."""
    effect, main, sibling = design_effect(learned, task), [], []
    for level, rate in enumerate(chain_rates(learned, task, depth), start=1):
        seen, beside = _counts(learned, task, level, "main"), _counts(learned, task, level, "sibling")
        main.append(_by_rank(rate, seen, effect, top_k))
        after_sibling = _posterior(beside, rate.mean, TUNING.prior_drafts, effect)
        sibling.append(_by_rank(after_sibling, beside, effect, top_k))
    return TaskAcceptance(tuple(main), tuple(sibling))


def chain_rates(learned: LearnedState, task: str | None, depth: int) -> list[Estimate]:
    """Return the acceptance rates of a chain at depths 1..``depth``. Task None is all tasks together."""
    pooled = chain_rates(learned, None, depth) if task is not None else []
    effect, found = design_effect(learned, task), list[Estimate]()
    for level in range(1, depth + 1):
        if pooled:
            mean, weight = pooled[level - 1].mean, TUNING.task_prior_drafts
        else:
            mean, weight = (found[-1].mean, TUNING.prior_drafts) if found else (0.5, 2)
        found.append(_posterior(_counts(learned, task, level, "main"), mean, weight, effect))
    return found


def lacking(learned: LearnedState) -> str | None:
    """Return what the estimates lack for a first decision, or None once they are reliable.

    The independent drafts must outweigh their prior twice, and the steps under traffic a prior of step times. Steps
    that workers timed before they served are the prior.
    """
    parts = []
    if chain_rates(learned, None, 1)[0].weight < 2 * TUNING.prior_drafts:
        parts.append(f"acceptance rests on fewer than {2 * TUNING.prior_drafts:g} independent drafts")
    if sum(cost.values[0] - cost.made_up for cost in learned.costs) < TUNING.min_samples:
        parts.append(f"fewer than {TUNING.min_samples:g} steps were timed")
    return " and ".join(parts) or None


def design_effect(learned: LearnedState, task: str | None) -> float:
    """Return by how much the tokens of one request, which resemble each other, inflate variances."""
    sums = (RequestSums(*cell.sums) for cell in learned.requests if task in (None, cell.task))
    return effect_of([reduce(RequestSums.plus, sums, NO_REQUESTS)])


def effect_of(groups: Iterable[RequestSums]) -> float:
    """Return the design effect of groups of finished requests that may differ in acceptance, with its prior."""
    weight, total = TUNING.prior_requests, TUNING.prior_requests * TUNING.prior_effect
    for sums in groups:
        weight, total = weight + max(0.0, sums.n), total + _measured_effect(sums) * max(0.0, sums.n)
    return total / weight


def _measured_effect(sums: RequestSums) -> float:
    """Return the variance of the ratio accepted / drafts over requests (linearised), against independent drafts.

    The accepted length of a draft varies about as much as its mean allows.
    """
    if sums.d <= 0 or sums.a <= 0:
        return TUNING.prior_effect
    ratio = sums.a / sums.d
    between = max(0.0, sums.aa - 2 * ratio * sums.ad + ratio**2 * sums.dd) / sums.d
    return min(TUNING.prior_requests, max(1.0, between / (ratio * (1 + ratio))))


def _counts(learned: LearnedState, task: str | None, depth: int, parent: str) -> Hits:
    cells = (cell for cell in learned.acceptance if (cell.depth, cell.parent) == (depth, parent))
    return reduce(Hits.plus, (Hits(c.hits, c.total, c.ranks) for c in cells if task in (None, c.task)), NO_HITS)


def _posterior(counts: Hits, prior_mean: float, prior_weight: float, effect: float) -> Estimate:
    """Return the Beta posterior. For the variance, ``effect`` drafts count as one."""
    mean = (counts.hits + prior_mean * prior_weight) / (counts.total + prior_weight)
    mean = min(1 - TUNING.least_share, max(TUNING.least_share, mean))
    weight = counts.total / effect
    return Estimate(mean, mean * (1 - mean) / (weight + prior_weight + 1), weight)


def _by_rank(first: Estimate, counts: Hits, effect: float, top_k: int) -> tuple[Estimate, ...]:
    """Return the rates of ranks 0..``top_k`` - 1. Later ranks share the misses; none is better than the one before."""
    found, misses = [first], max(0.0, counts.total - counts.hits)
    for rank in range(1, top_k):
        count = counts.ranks[rank - 1] if rank <= len(counts.ranks) else 0.0
        prior = TUNING.rank_share * 0.5 ** (rank - 1) * TUNING.prior_drafts
        share = min(1.0, (count + prior) / (misses + TUNING.prior_drafts))
        own = share * (1 - share) / (misses / effect + TUNING.prior_drafts + 1)
        variance = (1 - first.mean) ** 2 * own + share**2 * first.variance
        mean = max(TUNING.least_share, min(found[-1].mean, (1 - first.mean) * share))
        found.append(Estimate(mean, variance, misses / effect))
    return tuple(found)


# Load on the workers: the mean request, the objectives, and the tasks that share a load.

_PREFILL_TOKENS = FEATURES.index("prefill_tokens")


class Request(NamedTuple):
    """The mean request, in tokens."""

    prompt: float
    """Prompt tokens that the prefix cache does not have."""
    output: float
    context: float
    """Tokens in the cache while it runs."""


class Prompt(NamedTuple):
    """The mean prompt: number of steps that read it, and seconds that it adds to each."""

    steps: int = 1
    seconds: float = 0


@dataclass(frozen=True, slots=True)
class Objective:
    """Objectives of a deployment, and the prompt that a first token waits for."""

    asked: ObjectiveSpec = field(default_factory=ObjectiveSpec)
    prompt: Prompt = field(default_factory=Prompt)
    ttft_ratio: float = 1
    """The percentile that the objective bounds over the mean; 1 where it bounds the mean."""
    itl_ratio: float = 1

    @property
    def min_speedup(self) -> float:
        return self.asked.min_speedup

    def violation(self, step_seconds: float, tokens: Iterable[float]) -> float:
        """Return by how much the worst objective is missed, as a share of it. ``tokens`` are those of a step by task.

        A prompt waits for half a step under way, and is then read. Waiting for a slot is left to scaling.
        """
        worst = 1.0
        if (most := self.asked.itl_seconds) is not None:
            itl = self.itl_ratio * step_seconds / min(tokens, default=1.0)
            worst = max(worst, itl / most)
        if (most := self.asked.ttft_seconds) is not None:
            first = 0.5 * step_seconds + self.prompt.steps * (step_seconds + self.prompt.seconds)
            worst = max(worst, self.ttft_ratio * first / most)
        return worst - 1


@dataclass(frozen=True, slots=True)
class TaskLoad:
    """One task at one load."""

    name: str
    bounds: Bounds
    acceptance: TaskAcceptance
    share: float
    """Of the running sequences under the present rows; sums to 1 over the tasks."""
    demand: float
    """Of the tokens that are asked for, whatever runs; sums to 1 over the tasks."""
    requests: float = math.inf
    """Number of requests that the acceptance was measured on."""
    extension: Callable[[int, float], tuple[float, float]] | None = None
    """Tokens and nodes that drafts without passes add to a main path of this depth, by its survival."""
    differing: Mapping[Position, float] | None = None
    """Variances of the changes in acceptance, where the merged drafts are not those that run."""

    def extended(self, shape: TreeShape) -> tuple[float, float]:
        """Return the tokens and the nodes of a step that are beyond its shape."""
        if self.extension is None:
            return 0.0, 0.0
        main = (0,) * max((len(path) for path in paths_of(shape) if not any(path)), default=0)
        return self.extension(len(main), self.acceptance.survival(main))

    def tokens(self, shape: TreeShape) -> float:
        """Return the expected tokens of a step."""
        return self.acceptance.tokens(shape) + self.extended(shape)[0]


def tasks_at(
    model: AcceptanceModel, rows: Sequence[RowState], load: Load, kv_tokens: float | None
) -> tuple[TaskLoad, ...]:
    """Return the tasks of the rows of one load, with no more draft tokens than the cache has room for."""
    rates = {row.task: model.of(row.task, load.context) for row in rows}
    tokens = {row.task: rates[row.task].tokens(row.shape) for row in rows}
    output = _output_tokens(model.learned, tokens)
    steps = {task: output[task] / tokens[task] for task in tokens}
    total = sum(steps.values())
    raw = {task: max(TUNING.least_share, steps[task] / total) if total > 0 else 1.0 for task in tokens}
    shares = {task: share / sum(raw.values()) for task, share in raw.items()}
    mean, requests = sum(shares[task] * tokens[task] for task in tokens), _requests_by_task(model.learned, tokens)
    return tuple(
        TaskLoad(
            task,
            _fitting(bounds_of(model.speculation, task), load, kv_tokens),
            rates[task],
            shares[task],
            shares[task] * tokens[task] / mean,
            requests[task],
        )
        for task in tokens
    )


def idle(learned: LearnedState, tasks: Collection[str]) -> frozenset[str]:
    """Return the tasks that send next to nothing while others do. Tasks without rows count as ``other``."""
    tokens = _output_tokens(learned, tasks)
    total = sum(tokens.values())
    return frozenset(task for task in tasks if total > 0 and tokens[task] < TUNING.least_share * total)


def request_of(learned: LearnedState) -> Request | None:
    """Return the mean request, or None before the first has ended. A running request has half of its output."""
    total = _traffic(learned)
    if min(total.arrivals, total.finished, total.output_tokens) <= 0:
        return None
    running = learned.load.sequences * max(1, len(learned.pods))
    under_way = min(max(0.0, total.arrivals - total.finished), running)
    output = max(1.0, total.output_tokens / (total.finished + under_way / 2))
    read = max(0.0, total.prompt_tokens - total.cached_tokens) / total.arrivals
    return Request(read, output, total.prompt_tokens / total.arrivals + output / 2)


def objective_of(
    asked: ObjectiveSpec, learned: LearnedState, reports: Iterable[Report], step_tokens: int | None = None
) -> Objective:
    """Return the objective of a deployment. The reports have the latencies of its workers since they started."""
    prompt = prompt_of(learned, step_tokens)
    if asked.percentile is None:
        return Objective(asked, prompt)
    cells = [cell for report in reports for cell in report.latency]
    ttft, itl = ([cell for cell in cells if cell.name == name] for name in ("ttft", "ttit"))
    return Objective(asked, prompt, percentile_ratio(ttft, asked.percentile), percentile_ratio(itl, asked.percentile))


def percentile_ratio(cells: Sequence[LatencyHistogram], percentile: int) -> float:
    """Return a percentile of a latency over its mean, at most the last edge of the histograms over the mean.

    Before ``fleet_samples``, latencies are taken to be exponential, as the time in an M/M/1 queue is.
    """
    alike = [cell for cell in cells if cell.edges == cells[0].edges]
    counts, seconds = np.sum([cell.counts for cell in alike], axis=0), sum(cell.sum for cell in alike)
    total = float(np.sum(counts))
    if total < TUNING.fleet_samples or seconds <= TUNING.least_seconds:
        return -math.log(1 - percentile / 100)
    below, edges = np.append(0, np.cumsum(counts[:-1])), (0.0, *alike[0].edges)
    return float(np.interp(percentile / 100 * total, below, edges)) * total / seconds


def prompt_of(learned: LearnedState, step_tokens: int | None = None) -> Prompt:
    """Return the steps and seconds that reading the mean prompt takes, at most ``step_tokens`` in one step."""
    times, request = StepTimeModel.fit(learned.costs, learned.wander), request_of(learned)
    if times is None or request is None:
        return Prompt()
    steps = max(1, math.ceil(request.prompt / (step_tokens or EngineConfig().max_num_batched_tokens)))
    return Prompt(steps, request.prompt / steps * prompt_token_seconds(learned, times))


def prompt_token_seconds(learned: LearnedState, times: StepTimeModel) -> float:
    """Return the seconds that one prompt token adds to a step: beyond decoding, in steps with prefill."""
    moments = Moments(learned.prefill)
    if not learned.prefill or moments.count <= 0 or moments.x[_PREFILL_TOKENS] <= 0:
        return 0.0
    x = moments.mean_x
    return max(0.0, moments.mean_seconds - max(0.0, times.linear((*x[:_PREFILL_TOKENS], 0.0)))) / x[_PREFILL_TOKENS]


def _traffic(learned: LearnedState) -> TrafficSums:
    return reduce(TrafficSums.plus, (TrafficSums(*cell.sums) for cell in learned.traffic), NO_TRAFFIC)


def _output_tokens(learned: LearnedState, tasks: Collection[str]) -> Mapping[str, float]:
    return _by_row(tasks, ((cell.task, TrafficSums(*cell.sums).output_tokens) for cell in learned.traffic))


def _requests_by_task(learned: LearnedState, tasks: Collection[str]) -> dict[str, float]:
    """Return the requests that remembered drafts are from, by task: at most those that came, infinite if unknown."""
    ended = [(cell.task, RequestSums(*cell.sums)) for cell in learned.requests]
    came = _by_row(tasks, ((cell.task, TrafficSums(*cell.sums).arrivals) for cell in learned.traffic))
    first = (cell for cell in learned.acceptance if (cell.depth, cell.parent) == (1, "main"))
    drafts = _by_row(tasks, ((cell.task, cell.total) for cell in first))
    count = _by_row(tasks, ((task, sums.n) for task, sums in ended))
    drafted = _by_row(tasks, ((task, sums.d) for task, sums in ended))
    known = {task: drafts[task] * count[task] / drafted[task] for task in tasks if drafted[task] > 0}
    return {task: min(came[task] or math.inf, known.get(task) or math.inf) for task in tasks}


def _by_row(tasks: Collection[str], values: Iterable[tuple[str, float]]) -> Mapping[str, float]:
    """Return sums by task. Tasks without rows here count as ``other``."""
    sums = dict.fromkeys((*tasks, OTHER_TASK), 0.0)
    for name, value in values:
        sums[name if name in tasks else OTHER_TASK] += value
    return sums


def _fitting(bounds: Bounds, load: Load, kv_tokens: float | None) -> Bounds:
    """Return the bounds within the cache. The engine reserves two worst-case steps of every sequence."""
    if not kv_tokens:
        return bounds
    nodes = max(1, bounds.least, min(bounds.max_nodes, int((kv_tokens / load.sequences - load.context_tokens) / 2)))
    return replace(bounds, max_nodes=nodes, most=max(bounds.least, min(bounds.most, nodes)))
