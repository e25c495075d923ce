"""How fast steps are at loads that may come, with the shapes that would be chosen there; and the mean request.

What scaling asks of planning: the shape is chosen anew at each load, so capacity knows that shapes grow shallower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from specdecode_operator.api.v1alpha1 import SpeculationSpec
from specdecode_operator.planning.bounds import bounds_of, follows
from specdecode_operator.planning.loads import Load, bucket_of
from specdecode_operator.planning.mix import SituationAt, situations
from specdecode_operator.planning.options import weigh
from specdecode_operator.planning.promise import Prompt
from specdecode_operator.planning.rows import rows_of
from specdecode_operator.planning.steptime import Seconds, StepTimes
from specdecode_operator.state.learned import LearnedState, RowState
from specdecode_operator.telemetry.counters import NO_TRAFFIC, Moments, TrafficSums
from specdecode_worker.contract import FEATURES, Buckets, EngineConfig

_PREFILL_TOKENS = FEATURES.index("prefill_tokens")
STEP_TOKENS = int(EngineConfig().max_num_batched_tokens)
"""Of prompts, in one step at most: what every worker is configured with."""


class Request(NamedTuple):
    """The mean request, in tokens."""

    prompt: float
    """Without what the cache had."""
    output: float
    context: float
    """In the cache while it runs."""


class Paced(NamedTuple):
    """A step of one load with its best shapes."""

    seconds: float
    tokens: float
    least_tokens: float
    error: float
    """Standard error of log(seconds / tokens)."""
    shapes: str


class _Decoding(NamedTuple):
    seconds: Seconds
    tokens: float
    least_tokens: float
    tokens_variance: float
    """Of the logarithm."""
    shapes: str


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps of one worker at any number of sequences; the shapes are those that would be chosen there."""

    speculation: SpeculationSpec
    found: Buckets
    rows: tuple[RowState, ...]
    situation_at: SituationAt
    prompt_token_seconds: float
    context_tokens: float

    known: dict[float, _Decoding] = field(default_factory=dict)
    """By sequences: the same loads are asked for again and again."""

    def __call__(self, sequences: float, prompt_tokens: float) -> Paced:
        if sequences not in self.known:
            self.known[sequences] = self._decoding(sequences)
        found = self.known[sequences]
        seconds = found.seconds.mean + prompt_tokens * self.prompt_token_seconds
        error = math.sqrt(found.seconds.variance / seconds / seconds + found.tokens_variance)
        return Paced(seconds, found.tokens, found.least_tokens, error, found.shapes)

    def _decoding(self, sequences: float) -> _Decoding:
        """The best shapes at this load."""
        context = bucket_of(self.found.context, self.context_tokens)
        concurrency = bucket_of(self.found.concurrency, sequences)
        group = [row for row in self.rows if (row.concurrency, row.context) == (concurrency, context)]
        situation = self.situation_at(Load(sequences, self.context_tokens), context, group)
        assert situation is not None, "a pace is made of step times"
        if not follows(self.speculation):
            situation = situation.with_only((), {row.task: row.shape for row in group})
        options = weigh(situation, situation.best())
        shapes, option = min(options.by_shapes.items(), key=lambda found: found[1].rank)
        told = ", ".join(f"{task} {shape}" for task, shape in shapes)
        least = min(option.by_task.values())
        return _Decoding(option.seconds, option.tokens, least, options.tokens_variance(shapes), told)


def pace(
    speculation: SpeculationSpec, learned: LearnedState, found: Buckets, request: Request, *, kv_tokens: float | None
) -> Pace | None:
    """None while no step was timed."""
    times = StepTimes.fit(learned.costs, learned.wander)
    if times is None:
        return None
    prompt = _prompt(learned, times)
    at = situations(speculation, learned, times, kv_tokens=kv_tokens, prompt=prompt)
    rows = tuple(
        row.running(bounds_of(speculation, row.task).nearest(row.shape)) for row in rows_of(speculation, learned, found)
    )
    return Pace(speculation, found, rows, at, prompt_token_seconds(learned, times), request.context)


def request_of(learned: LearnedState) -> Request | None:
    """The mean of what came in lately; None before the first requests have ended. Who still runs has said half of an
    answer, on average: counted by those that ended, the first answers would look as long as all that run."""
    total = NO_TRAFFIC
    for cell in learned.traffic:
        total = total.plus(TrafficSums(*cell.sums))
    if total.arrivals <= 0 or total.finished <= 0 or total.output_tokens <= 0:
        return None
    under_way = min(max(0.0, total.arrivals - total.finished), learned.load.sequences)
    output = max(1.0, total.output_tokens / (total.finished + under_way / 2))
    whole = total.prompt_tokens / total.arrivals
    read = max(0.0, total.prompt_tokens - total.cached_tokens) / total.arrivals
    return Request(read, output, whole + output / 2)


def prompt_of(learned: LearnedState) -> Prompt:
    """What reading the mean prompt takes."""
    times = StepTimes.fit(learned.costs, learned.wander)
    return Prompt() if times is None else _prompt(learned, times)


def prompt_token_seconds(learned: LearnedState, times: StepTimes) -> float:
    """What a token of a prompt adds to a step: what steps with prefill take beyond their decoding, over its tokens."""
    if not learned.prefill:
        return 0.0
    moments = Moments(learned.prefill)
    if moments.count <= 0 or moments.x[_PREFILL_TOKENS] <= 0:
        return 0.0
    x = moments.mean_x
    decoding = times.linear((*x[:_PREFILL_TOKENS], 0.0))
    return max(0.0, moments.mean_seconds - max(0.0, decoding)) / x[_PREFILL_TOKENS]


def _prompt(learned: LearnedState, times: StepTimes) -> Prompt:
    request = request_of(learned)
    if request is None:
        return Prompt()
    steps = max(1, math.ceil(request.prompt / STEP_TOKENS))
    return Prompt(steps=steps, seconds=request.prompt / steps * prompt_token_seconds(learned, times))
