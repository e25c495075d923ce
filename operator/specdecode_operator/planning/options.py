"""Shapes weighed against each other at one load: time per token, and how sure one is of a gain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple

from specdecode_operator.planning.batches import Batch, Met, batches
from specdecode_operator.planning.situation import Shapes, Situation, Task
from specdecode_operator.planning.steptime import DIFFERENCE_MISFIT, Seconds, ordered
from specdecode_operator.planning.trees import Parameter, expected, slopes
from specdecode_worker.contract import TreeShape

AT_ONCE_SECONDS = 60.0
"""Steps that were timed no further apart met the same weather."""
ALIKE = 0.3
"""Correlation of the errors of one task's chances."""
UNLIKE = 0.2
"""How much requests differ in what a change brings them, as a logarithm, and at most as much as it brings: on the
recorded head 0.02 to 0.17 by domain and quality, from none to a chain of 3 and from that to one of 7, a few beyond."""
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Option:
    """Shapes of all tasks at one load, and what they bring."""

    shapes: Shapes
    seconds: Seconds
    verified: float
    """Tokens that a sequence has verified in a step, the root included; the mean over the tasks."""
    by_task: dict[str, float]
    """Expected tokens of a step."""
    shares: dict[str, float]
    """Of the running sequences, once these shapes have run for a while."""
    tokens: float
    """Of a step: the mean over the running sequences."""
    violation: float
    """By how much the worst promise is missed."""

    @property
    def per_token(self) -> float:
        """Seconds per token of one sequence."""
        return self.seconds.mean / self.tokens

    @property
    def rank(self) -> tuple[float, float]:
        """What is kept of the promises comes first, then time per token; less is better."""
        return self.violation, self.per_token

    @property
    def passes(self) -> int:
        return max(shape.depth for _, shape in self.shapes)

    def shape(self, task: str) -> TreeShape:
        return next(shape for name, shape in self.shapes if name == task)

    def told(self, task: str) -> str:
        """In words, for the row of a task."""
        timed = "" if self.seconds.steps else " (extrapolated)"
        shape = self.shape(task)
        name = str(shape) if shape.is_chain and shape.nodes else f"tree {shape}" if shape.nodes else "plain"
        return f"{name} {self.seconds.mean * 1000:.1f} ms{timed} for {self.by_task[task]:.2f} tokens"


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that is weighed at one load."""

    situation: Situation
    by_shapes: dict[Shapes, Option]
    known: dict[tuple[str, Shapes], dict[Parameter, float]] = field(default_factory=dict)
    """Slopes by task and shapes: each candidate is held against the same present shapes."""

    def gain(self, before: Shapes, after: Shapes) -> float:
        """Expected relative fall of the time per token: 0.1 is a tenth more tokens in the same time. Where a promise
        is broken it is how much less so."""
        one, two = self.by_shapes[before], self.by_shapes[after]
        if one.violation != two.violation:
            return (1 + one.violation) / (1 + two.violation) - 1
        return one.per_token / two.per_token - 1

    def confidence(self, before: Shapes, after: Shapes, least: float) -> float:
        """P(gain > least), the logarithm of the gain taken as normal. ``least`` is asked of the tokens of the tasks
        that move, not of all: a rare task is worth its own gain."""
        one, two = self.by_shapes[before], self.by_shapes[after]
        spread = math.sqrt(self._time_variance(one, two) + self._tokens_variance(one, two))
        distance = math.log(1 + self.gain(before, after)) - self._moving(one, two) * math.log(1 + least)
        return _NORMAL.cdf(distance / spread) if spread > 0 else float(distance > 0)

    def surest(self, before: Shapes, least: float, among: Iterable[Shapes], certainty: float) -> Shapes | None:
        """The best of those that are surely better than ``before``."""
        sure = [one for one in among if one != before and self.confidence(before, one, least) >= certainty]
        return min(sure, key=lambda shapes: self.by_shapes[shapes].rank, default=None)

    def within_timed(self) -> list[Shapes]:
        """Those with no more draft passes than were timed at this load. A deeper step may cost anything: no model of
        shallower ones makes it sure."""
        timed = max((option.passes for option in self.by_shapes.values() if option.seconds.steps), default=0)
        return [shapes for shapes, option in self.by_shapes.items() if option.passes <= timed]

    def tokens_variance(self, shapes: Shapes) -> float:
        """Of the logarithm of the expected tokens."""
        option = self.by_shapes[shapes]
        return sum(
            slope**2 * task.rates.chance(parameter).variance
            for task in self.situation.tasks
            for parameter, slope in self._weighted(task, option).items()
        )

    def _moving(self, one: Option, two: Option) -> float:
        """Share of the tokens that the tasks which move have."""
        pairs = zip(self.situation.tasks, one.shapes, two.shapes, strict=True)
        return sum(task.demand for task, before, after in pairs if before != after)

    def _time_variance(self, one: Option, two: Option) -> float:
        """Of the logarithm of the ratio. Steps of one number of passes err together: of them it is enough to know
        the difference."""
        each = _relative(one.seconds) + _relative(two.seconds)
        if abs(one.seconds.at - two.seconds.at) < AT_ONCE_SECONDS:
            each -= 2 * math.sqrt(one.seconds.drift * two.seconds.drift)
        apart = two.verified - one.verified
        if one.passes != two.passes or not apart:
            return each
        slope = self.situation.times.slope_variance(self.situation.load) * apart**2
        misfit = (DIFFERENCE_MISFIT * (two.seconds.mean - one.seconds.mean)) ** 2
        return min(each, (slope + misfit) / (one.seconds.mean * two.seconds.mean))

    def _tokens_variance(self, one: Option, two: Option) -> float:
        """Of log tokens(two) - log tokens(one): shapes share chances, so those errors do not add."""
        each = sum(self._task_variance(task, one, two) for task in self.situation.tasks)
        few = sum(self._request_variance(task, one, two) for task in self.situation.tasks)
        return each + few + self._mix_variance(one, two)

    def _request_variance(self, task: Task, one: Option, two: Option) -> float:
        """Of few requests one knows their own acceptance well, and little of the next one's."""
        change = abs(math.log(two.by_task[task.name] / one.by_task[task.name]))
        weight = (one.shares[task.name] + two.shares[task.name]) / 2
        return (weight * min(UNLIKE, change)) ** 2 / max(1.0, task.requests)

    def _mix_variance(self, one: Option, two: Option) -> float:
        """Who is there is known from so many requests: it errs as shares of a sample do."""
        errors = (
            (task.share, one.by_task[task.name] / one.tokens - two.by_task[task.name] / two.tokens)
            for task in self.situation.tasks
        )
        return sum(share * error**2 for share, error in errors) / self.situation.requests

    def _task_variance(self, task: Task, one: Option, two: Option) -> float:
        """The errors of a task's chances go together: who was lucky with easy answers was so at many depths."""
        before, after = self._weighted(task, one), self._weighted(task, two)
        errors = [
            (after.get(parameter, 0.0) - before.get(parameter, 0.0)) * math.sqrt(task.rates.chance(parameter).variance)
            for parameter in {*before, *after}
        ]
        apart = sum(error**2 for error in errors)
        return max(apart, ALIKE * sum(errors) ** 2 + (1 - ALIKE) * apart)

    def _weighted(self, task: Task, option: Option) -> dict[Parameter, float]:
        key = task.name, option.shapes
        if key not in self.known:
            self.known[key] = _weighted(task, option)
        return self.known[key]


def weigh(situation: Situation, candidates: Iterable[Shapes]) -> Options:
    """Every candidate as an option. Step times are ordered: what is larger never costs less."""
    found = list(dict.fromkeys(candidates))
    mixes = [_mix(situation, shapes) for shapes in found]
    met = [batches(shapes, mix.shares, situation.load.sequences) for shapes, mix in zip(found, mixes, strict=True)]
    times = _times(situation, {one.batch for each in met for one in each})
    options = [_option(situation, *each, times) for each in zip(found, mixes, met, strict=True)]
    return Options(situation, {option.shapes: option for option in options})


def _times(situation: Situation, sorts: Iterable[Batch]) -> dict[Batch, Seconds]:
    """Ordered by size: of two that were timed at once, the smaller is looked at first."""
    order = sorted(sorts)
    curves = {
        passes: situation.times.curve(situation.load, passes, situation.context)
        for passes in {batch.passes for batch in order}
    }
    rising = ordered(
        [curves[batch.passes].seconds(batch.verified) for batch in order],
        [(float(batch.passes), batch.verified) for batch in order],
    )
    return dict(zip(order, rising, strict=True))


class _Mix(NamedTuple):
    by_task: dict[str, float]
    shares: dict[str, float]
    tokens: float


def _mix(situation: Situation, shapes: Shapes) -> _Mix:
    """Who gets more tokens a step leaves sooner, where requests come whatever the answers take: then a task's share of
    the batch goes with demand / tokens. Where as many clients as ever wait for answers, it stays. Counters don't say
    which; halfway between (a geometric mean of both shares) neither is far off."""
    by_task = {task.name: expected(task.rates, shape) for task, (_, shape) in zip(situation.tasks, shapes, strict=True)}
    raw = {task.name: math.sqrt(task.share * task.demand / by_task[task.name]) for task in situation.tasks}
    total = sum(raw.values())
    shares = {name: share / total for name, share in raw.items()}
    return _Mix(by_task, shares, sum(share * by_task[name] for name, share in shares.items()))


def _option(
    situation: Situation, shapes: Shapes, mix: _Mix, met: Iterable[Met], times: Mapping[Batch, Seconds]
) -> Option:
    """The seconds are those of the mean step of the mean sequence."""
    parts = [(mix.shares[one.task] * one.weight, times[one.batch]) for one in met]
    by_task = dict.fromkeys(mix.by_task, 0.0)
    for one in met:
        by_task[one.task] += one.weight * times[one.batch].mean
    seconds = _mean(parts)
    paced = (mix.by_task[name] * seconds.mean / own for name, own in by_task.items())
    violation = situation.promise.violation(seconds.mean, paced)
    verified = sum(mix.shares[one.task] * one.weight * one.batch.verified for one in met)
    return Option(shapes, seconds, verified, mix.by_task, mix.shares, mix.tokens, violation)


def _mean(parts: list[tuple[float, Seconds]]) -> Seconds:
    """Of step times by weight; their errors go together. Timed are they when those that matter are."""
    if len(parts) == 1:
        return parts[0][1]
    mean = sum(weight * seconds.mean for weight, seconds in parts)
    deviation = sum(weight * math.sqrt(seconds.variance) for weight, seconds in parts)
    drift = sum(weight * seconds.mean * math.sqrt(seconds.drift) for weight, seconds in parts) / mean
    heaviest = max(weight for weight, _ in parts)
    often = [seconds for weight, seconds in parts if weight >= heaviest / 4]
    steps, at = min(seconds.steps for seconds in often), min(seconds.at for seconds in often)
    return Seconds(mean, deviation**2, steps, at, sum(weight * seconds.line for weight, seconds in parts), drift**2)


def _weighted(task: Task, option: Option) -> dict[Parameter, float]:
    """Slopes of the logarithm of all tokens by the chances of one task: half through what its sequences get, half
    through how many of them there are."""
    weight = option.shares[task.name] * (1 + option.by_task[task.name] / option.tokens) / 2
    return {parameter: weight * slope for parameter, slope in slopes(task.rates, option.shape(task.name)).items()}


def _relative(seconds: Seconds) -> float:
    return seconds.variance / seconds.mean**2
