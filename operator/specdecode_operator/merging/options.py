"""Time per token at the present load with every subset of the drafts that a task merges. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdecode_operator.merging.subsets import Credit, Names, log_variance, subsets_of
from specdecode_operator.planning.draft_trees import Position, TaskAcceptance, chain_of
from specdecode_operator.planning.estimates import Estimate, confidence, mean_time
from specdecode_operator.planning.loads import Load
from specdecode_operator.planning.shape_search import Shapes, batches
from specdecode_operator.planning.step_time_model import StepTimeModel
from specdecode_operator.planning.task_bounds import Bounds
from specdecode_operator.planning.tuning import TUNING as PLANNING
from specdecode_operator.planning.workload import TaskLoad
from specdecode_operator.state.learned import LearnedState
from specdecode_worker.contract import TreeShape


@dataclass(frozen=True, slots=True)
class Present:
    """The present load: step times, and the tasks with their shapes."""

    times: StepTimeModel
    load: Load
    tasks: tuple[TaskLoad, ...]
    shapes: Shapes

    def task(self, name: str) -> TaskLoad | None:
        """Return a task; None if it has no traffic here."""
        return next((task for task in self.tasks if task.name == name), None)


@dataclass(frozen=True, slots=True)
class Option:
    """Drafts that a task could merge, compared with those that it merges now, each with its best shape."""

    names: Names
    gain: float
    """log(time per token now / with these drafts), over all sequences of the batch."""
    error: float
    """Standard error of the gain."""
    tokens: float
    """Tokens a step of the task's sequences, over those now, at the best shape of the drafts that run now."""
    seconds: float
    """Seconds of a step, over those now, at the same shape."""

    @property
    def confidence(self) -> float:
        """Probability that the gain is above 0."""
        return confidence(self.gain, self.error)

    @property
    def bound(self) -> float:
        """Lower confidence bound of the gain, at the confidence that the planner asks for."""
        return self.gain - PLANNING.z * self.error


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Step of the present load with drafts and shape of one task."""

    shape: TreeShape
    passes: int
    seconds: Estimate
    own_tokens: float
    tokens: float
    """Mean over all sequences."""
    slopes: dict[Position, float]
    """Derivatives of log(tokens) by the acceptance rates of the task."""

    @property
    def per_token(self) -> float:
        """Seconds per token of one sequence."""
        return self.seconds.mean / self.tokens


def options_of(learned: LearnedState, present: Present, credit: Credit, bounds: dict[Names, Bounds]) -> list[Option]:
    """Return what every subset of the running drafts brings, the running drafts themselves first.

    Args:
        learned: Learned state of the deployment.
        present: The present load, where the task has traffic.
        credit: Credit of the task's drafts.
        bounds: Bounds of the task's shapes with each subset of its running drafts.
    """
    task = credit.drafts.task
    shape = dict(present.shapes)[task]
    options: list[Option] = []
    for names in subsets_of(credit.running):
        limits = bounds[names]
        depth, top_k = max(limits.most, shape.depth), max(limits.top_k, max(shape.ranks, default=0) + 1)
        rates = credit.acceptance(learned, names, depth, top_k)
        shapes = dict.fromkeys((shape, *map(chain_of, range(limits.least, limits.most + 1))))
        outcomes = [_outcome(present, credit, names, limits, rates, each) for each in shapes]
        if not options:
            now = min(outcomes, key=lambda one: one.per_token)
            options.append(Option(names, 0.0, 0.0, 1.0, 1.0))
        else:
            paired = credit.error(names, rates)
            same = next(one for one in outcomes if one.shape == now.shape)
            compared = (_compared(names, now, one, same, (rates, paired)) for one in outcomes)
            options.append(max(compared, key=lambda option: option.bound))
    return options


def _outcome(
    present: Present, credit: Credit, names: Names, bounds: Bounds, rates: TaskAcceptance, shape: TreeShape
) -> _Outcome:
    """Return the step in which the task runs ``shape`` with the drafts ``names``, and the others run as they do."""
    name = credit.drafts.task
    shapes = tuple((task, shape if task == name else other) for task, other in present.shapes)
    by_task = {task.name: bounds if task.name == name else task.bounds for task in present.tasks}
    shares = {task.name: task.share for task in present.tasks}
    main = _main_depth(shape)
    more_tokens, more_nodes = credit.extension(names, main, rates.survival((0,) * main))
    met = [
        (
            shares[one.task] * one.weight,
            one.batch._replace(verified=round(one.batch.verified + shares[name] * more_nodes, 1)),
        )
        for one in batches(shapes, by_task, shares, present.load.sequences)
    ]
    times = present.times.predict(present.load, (batch for _, batch in met))
    own = rates.tokens(shape) + more_tokens
    tokens = sum(
        task.share * (own if task.name == name else task.acceptance.tokens(dict(shapes)[task.name]))
        for task in present.tasks
    )
    weight = shares[name] * rates.tokens(shape) / tokens
    slopes = {at: weight * slope for at, slope in rates.slopes(shape).items()}
    seconds = mean_time([(weight, times[batch]) for weight, batch in met])
    return _Outcome(shape, max(batch.passes for _, batch in met), seconds, own, tokens, slopes)


def _compared(
    names: Names,
    now: _Outcome,
    other: _Outcome,
    same: _Outcome,
    evidence: tuple[TaskAcceptance, dict[Position, float]],
) -> Option:
    """Return the option of running ``other``. Times of equal passes err together, as in the search for shapes.

    ``same`` has the drafts of ``other`` and the shape of ``now``. ``evidence`` has their rates, and the variances of
    the differences.
    """
    rates, paired = evidence
    time = now.seconds.relative_variance + other.seconds.relative_variance
    ratio = other.seconds.mean / now.seconds.mean
    if now.passes == other.passes:
        time = min(time, (math.log(ratio) / 2) ** 2)
    before = {at: slope for at, slope in now.slopes.items() if at in other.slopes or _has(rates, at)}
    variance = time + log_variance(before, other.slopes, rates, paired)
    gain = math.log(now.per_token / other.per_token)
    tokens, seconds = same.own_tokens / now.own_tokens, same.seconds.mean / now.seconds.mean
    return Option(names, gain, math.sqrt(variance), tokens, seconds)


def _has(rates: TaskAcceptance, at: Position) -> bool:
    depth, is_main, rank = at
    levels = rates.main if is_main else rates.sibling
    return depth <= len(levels) and rank < len(levels[depth - 1])


def _main_depth(shape: TreeShape) -> int:
    """Return the depth of the path of rank 0."""
    depth, node = 0, 0
    while node in shape.parents:
        node = shape.parents.index(node) + 1
        depth += 1
    return depth
