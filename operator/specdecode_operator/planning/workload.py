"""Load on the workers: the mean request, the objectives, and the tasks that share a load."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple

import numpy as np

from specdecode_operator.api.v1alpha1 import ObjectiveSpec
from specdecode_operator.planning.acceptance_model import AcceptanceModel
from specdecode_operator.planning.draft_trees import Position, TaskAcceptance, paths_of
from specdecode_operator.planning.loads import Load
from specdecode_operator.planning.step_time_model import StepTimeModel
from specdecode_operator.planning.task_bounds import Bounds, bounds_of
from specdecode_operator.planning.tuning import TUNING
from specdecode_operator.state.learned import LearnedState, RowState
from specdecode_operator.telemetry.counters import NO_TRAFFIC, Moments, RequestSums, TrafficSums
from specdecode_worker.contract import FEATURES, OTHER_TASK, EngineConfig, LatencyHistogram, Report, TreeShape

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
        if self.asked.itl_seconds is not None:
            itl = self.itl_ratio * step_seconds / min(tokens, default=1.0)
            worst = max(worst, itl / self.asked.itl_seconds)
        if self.asked.ttft_seconds is not None:
            first = 0.5 * step_seconds + self.prompt.steps * (step_seconds + self.prompt.seconds)
            worst = max(worst, self.ttft_ratio * first / self.asked.ttft_seconds)
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
    under_way = min(max(0.0, total.arrivals - total.finished), learned.load.sequences)
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
