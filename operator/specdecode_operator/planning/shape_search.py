"""The best shapes of all tasks at one load, and how sure one choice is to be better than another.

The time of a step depends on the whole batch, so shapes are chosen jointly. For each depth, the nodes of all tasks are
ordered by survival, and every prefix of that order is a candidate. This is exact where all tasks draft by one method: a
step's time depends on its draft passes and on how many nodes there are, and no node is likelier than its parent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from specdecode_operator.planning.draft_trees import Node, Path, Position, chain_of, paths_of, shape_of
from specdecode_operator.planning.estimates import Estimate, mean_time
from specdecode_operator.planning.loads import Load
from specdecode_operator.planning.step_time_model import Batch, StepTimeModel
from specdecode_operator.planning.task_bounds import Bounds
from specdecode_operator.planning.tuning import TUNING
from specdecode_operator.planning.workload import Objective, TaskLoad
from specdecode_worker.contract import TreeShape

Shapes = tuple[tuple[str, TreeShape], ...]
"""The shape of every task, in the order of the search's tasks."""
Mix = tuple[dict[str, float], dict[str, float]]
"""Tokens of a step, and share of the sequences, both by task."""


class Met(NamedTuple):
    """A sequence of ``task`` is in such a batch in this share of its steps."""

    task: str
    batch: Batch
    weight: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Shapes of all tasks at one load, with what they bring."""

    shapes: Shapes
    seconds: Estimate
    """Time of the mean step of the mean sequence."""
    passes: int
    """Most draft passes of a step."""
    by_task: dict[str, float]
    """Expected tokens of a step."""
    shares: dict[str, float]
    """Of the running sequences, once these shapes have run for a while."""
    tokens: float
    """Expected tokens of a step, mean over the running sequences."""
    violation: float
    """Share by which the worst objective is missed."""
    tasks: tuple[TaskLoad, ...]
    """Tasks with the drafts that they merge, in the order of the shapes."""

    @property
    def per_token(self) -> float:
        """Seconds per token of one sequence."""
        return self.seconds.mean / self.tokens

    @property
    def rank(self) -> tuple[float, float]:
        """Order of choices, the best first: objectives come before the time per token."""
        return self.violation, self.per_token

    @property
    def depth(self) -> int:
        return max(shape.depth for _, shape in self.shapes)

    @property
    def is_plain(self) -> bool:
        return not any(shape.nodes for _, shape in self.shapes)

    @property
    def is_timed(self) -> bool:
        return self.seconds.weight > 0


RANK = attrgetter("rank")
Found = tuple[Choice, Choice, list[Choice]]
"""The present choice, plain decoding, and candidates."""


@dataclass(frozen=True, slots=True)
class ShapeSearch:
    """Search at one load."""

    times: StepTimeModel
    load: Load
    tasks: tuple[TaskLoad, ...]
    objective: Objective
    known: dict[tuple[Shapes, tuple[str, ...]], Found] = field(default_factory=dict)

    def best(self, now: Shapes, free: Collection[str]) -> Found:
        """Return the present choice, plain decoding, and the candidates that are fast enough for the objective.

        Candidates are the best shapes for each depth, of all ``free`` tasks or of one alone. Others keep their shape.
        """
        key = now, tuple(free)
        if key not in self.known:
            plain_shapes = _changed(now, ((task.name, chain_of(task.bounds.least)) for task in self.tasks), free)
            groups = (free, *((task,) for task in free))
            joint = [_changed(now, shapes, group) for shapes in self.best_by_depth() for group in groups]
            found = self.evaluate([now, plain_shapes, *joint])
            plain, least = found[plain_shapes], self.objective.min_speedup
            fast = [
                one for one in found.values() if least <= 1 or one.is_plain or one.per_token * least <= plain.per_token
            ]
            self.known[key] = found[now], plain, fast
        return self.known[key]

    def best_by_depth(self) -> Iterator[Shapes]:
        """Yield the best shapes of each depth, the least depth first."""
        least = max(task.bounds.least for task in self.tasks)
        for depth in range(least, max([least, *(task.bounds.most for task in self.tasks)]) + 1):
            shapes = self._best_of(depth)
            if shapes is not None:
                yield shapes

    def evaluate(self, candidates: Iterable[Shapes]) -> dict[Shapes, Choice]:
        """Return every candidate with its step time and tokens."""
        bounds, mixes = {task.name: task.bounds for task in self.tasks}, {each: self._mix(each) for each in candidates}
        met = {
            shapes: batches(shapes, bounds, mix[1], self.load.sequences, self._extended(shapes))
            for shapes, mix in mixes.items()
        }
        times = self.times.predict(self.load, (one.batch for each in met.values() for one in each))
        return {shapes: self._choice(shapes, mix, met[shapes], times) for shapes, mix in mixes.items()}

    def _extended(self, shapes: Shapes) -> dict[str, float]:
        """Return the nodes of a step beyond its shapes, by task."""
        return {task.name: task.extended(shape)[1] for task, (_, shape) in zip(self.tasks, shapes, strict=True)}

    def gain(self, one: Choice, two: Choice) -> float:
        """Return log(time per token of ``one`` / of ``two``). While an objective is missed, how much less it is."""
        if one.violation != two.violation:
            return math.log((1 + one.violation) / (1 + two.violation))
        return math.log(one.per_token / two.per_token)

    def gain_error(self, one: Choice, two: Choice) -> float:
        """Return the standard error of the gain. Errors that both choices share do not add."""
        time = one.seconds.relative_variance + two.seconds.relative_variance
        if one.passes == two.passes:
            time = min(time, (math.log(one.seconds.mean / two.seconds.mean) / 2) ** 2)
        pairs = zip(one.tasks, two.tasks, strict=True)
        return math.sqrt(time + sum(_gain_variance(before, after, one, two) for before, after in pairs))

    def moving_demand(self, one: Choice, two: Choice) -> float:
        """Return the share of the tokens that belongs to tasks with a different shape, or with other drafts."""
        steps = zip(one.tasks, one.shapes, two.tasks, two.shapes, strict=True)
        return sum(task.demand for task, shape, other, after in steps if (task, shape) != (other, after))

    def tokens_variance(self, choice: Choice) -> float:
        """Return the variance of log(expected tokens per step)."""
        return sum(
            slope**2 * task.acceptance.rate(at).variance
            for task in choice.tasks
            for at, slope in _slopes(task, choice).items()
        )

    def _mix(self, shapes: Shapes) -> Mix:
        """Return the mix while ``shapes`` run.

        With open arrivals a task's share follows demand / tokens; with a fixed number of clients it does not change.
        Counters do not tell which, so the share is the geometric mean of both.
        """
        tokens = {task.name: task.tokens(shape) for task, (_, shape) in zip(self.tasks, shapes, strict=True)}
        raw = {task.name: math.sqrt(task.share * task.demand / tokens[task.name]) for task in self.tasks}
        return tokens, {name: share / sum(raw.values()) for name, share in raw.items()}

    def _choice(self, shapes: Shapes, mix: Mix, met: list[Met], times: dict[Batch, Estimate]) -> Choice:
        tokens, shares = mix
        seconds = mean_time([(shares[one.task] * one.weight, times[one.batch]) for one in met])
        own = dict.fromkeys(tokens, 0.0)
        for one in met:
            own[one.task] += one.weight * times[one.batch].mean
        violation = self.objective.violation(seconds.mean, (tokens[name] * seconds.mean / own[name] for name in tokens))
        mean = sum(share * tokens[name] for name, share in shares.items())
        passes = max(one.batch.passes for one in met)
        return Choice(shapes, seconds, passes, tokens, shares, mean, violation, self.tasks)

    def _best_of(self, depth: int) -> Shapes | None:
        """Return the best prefix of all nodes by survival among those that are ``depth`` deep."""
        tokens = {task.name: task.acceptance.tokens(chain_of(task.bounds.least)) for task in self.tasks}
        verified = 1 + sum(task.share * task.bounds.least for task in self.tasks)
        deepest = max(task.bounds.least for task in self.tasks)
        passes = max(task.bounds.passes(min(depth, task.bounds.most)) for task in self.tasks)
        steps, best, lowest = self._by_survival(depth), None, (math.inf, math.inf)
        for count in range(len(steps) + 1):
            if count:
                task, node = steps[count - 1]
                verified, tokens[task.name] = verified + task.share, tokens[task.name] + node.survival
                deepest = max(deepest, len(node.path))
            if deepest == depth:
                seconds = self.times.mean(self.load, Batch(passes, verified))
                mean = sum(task.share * tokens[task.name] for task in self.tasks)
                rank = self.objective.violation(seconds, tokens.values()), seconds / mean
                best, lowest = (count, rank) if rank < lowest else (best, lowest)
        if best is None:
            return None
        paths = {task.name: list(paths_of(chain_of(task.bounds.least))) for task in self.tasks}
        for task, node in steps[:best]:
            paths[task.name].append(node.path)
        return tuple((name, shape_of(frozenset(found))) for name, found in paths.items())

    def _by_survival(self, depth: int) -> list[tuple[TaskLoad, Node]]:
        """Return the nodes beyond the least shapes that the bounds allow, of all tasks, likeliest first."""
        found: list[tuple[TaskLoad, Node]] = []
        for task in self.tasks:
            bounds, least = task.bounds, set[Path](paths_of(chain_of(task.bounds.least)))
            nodes = task.acceptance.best_nodes(min(depth, bounds.most), bounds.top_k, bounds.max_nodes)
            more = [node for node in nodes if node.path not in least]
            found += [(task, node) for node in more[: bounds.max_nodes - bounds.least]]
        return sorted(found, key=lambda step: (step[1].order, step[0].name))


def batches(
    shapes: Shapes,
    bounds: Mapping[str, Bounds],
    shares: Mapping[str, float],
    sequences: float,
    extended: Mapping[str, float] = MappingProxyType({}),
) -> list[Met]:
    """Return the batches that a sequence of each task is in; the weights of a task sum to 1.

    The shape with most draft passes in a batch decides how many a step makes. The other sequences are drawn by
    ``shares``. ``extended`` are nodes beyond the shapes.
    """
    passes = {name: bounds[name].passes(shape.depth) for name, shape in shapes}
    drafted = {name: shape.nodes + extended.get(name, 0.0) for name, shape in shapes}
    others, found = max(0.0, sequences - 1), list[Met]()
    for name, own in drafted.items():
        met, below = list[Met](), 0.0
        for most in sorted({count for count in passes.values() if count >= passes[name]}):
            inside = [(shares[task], nodes) for task, nodes in drafted.items() if passes[task] <= most]
            share = min(1.0, sum(weight for weight, _ in inside))
            nodes = sum(weight * count for weight, count in inside) / share if share > 0 else 0.0
            verified = 1 + (own + others * nodes) / (1 + others)
            met.append(Met(name, Batch(most, round(verified, 1)), share**others - below))
            below = share**others
        often = [one for one in met if one.weight >= TUNING.least_share]
        total = sum(one.weight for one in often)
        found += [one._replace(weight=one.weight / total) for one in often]
    return found


def _changed(now: Shapes, shapes: Iterable[tuple[str, TreeShape]], tasks: Collection[str]) -> Shapes:
    """Return ``now`` with the ``shapes`` of ``tasks``."""
    found = dict(shapes)
    return tuple((name, found[name] if name in tasks else shape) for name, shape in now)


def _gain_variance(before: TaskLoad, after: TaskLoad, one: Choice, two: Choice) -> float:
    """Return one task's part of the variance of log(tokens of two / tokens of one).

    Acceptance rates err together over depths, and requests differ in what a change brings; the larger doubt counts.
    Where other drafts are merged, the rates were measured at the same nodes, and their difference errs.
    """
    slopes, others, drafts = _slopes(before, one), _slopes(after, two), 0.0
    if after.differing is not None:
        rates = after.acceptance
        slopes = {at: slope for at, slope in slopes.items() if rates.has(at)}
        drafts = sum(slope**2 * after.differing.get(at, rates.rate(at).variance) for at, slope in others.items())
    errors = [
        (others.get(at, 0.0) - slopes.get(at, 0.0)) * math.sqrt(after.acceptance.rate(at).variance)
        for at in {**slopes, **others}
    ]
    apart, together = sum(error**2 for error in errors), sum(errors) ** 2
    rates_variance = max(apart, TUNING.depth_correlation * together + (1 - TUNING.depth_correlation) * apart)
    change = abs(math.log(two.by_task[after.name] / one.by_task[before.name]))
    weight = (one.shares[before.name] + two.shares[after.name]) / 2
    requests = (weight * min(TUNING.request_spread, change)) ** 2 / max(1.0, before.requests)
    return drafts + max(rates_variance, requests)


def _slopes(task: TaskLoad, choice: Choice) -> dict[Position, float]:
    """Return the derivatives of log(tokens) by the acceptance rates of one task.

    Half of it comes through the tokens of its sequences, half through their number.
    """
    weight = choice.shares[task.name] * (1 + choice.by_task[task.name] / choice.tokens) / 2
    return {at: weight * slope for at, slope in task.acceptance.slopes(dict(choice.shapes)[task.name]).items()}
