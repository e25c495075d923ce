"""Demand, and the arrival rate that one worker carries within its objectives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from specdecode_operator.scaling.tuning import TUNING
from specdecode_operator.telemetry.deltas import Delta
from specdecode_operator.types import Capacity, StepEstimate, StepModel

# Arrivals and arrival rates from the report differences of the last minute.


def arrival_rate(window: Iterable[Delta], *, now: float, within: float, standard_errors: float = 0) -> float:
    """Return the requests per second that arrived within the last ``within`` seconds.

    Args:
        window: Differences of the reports, one for each poll.
        now: Present time, in seconds since the epoch.
        within: Length of the period, in seconds.
        standard_errors: Distance of a lower confidence bound from the mean, for Poisson arrivals: n arrivals have a
            standard error of sqrt(n). With 0 the mean is returned.
    """
    recent = [delta for delta in window if delta.at > now - within]
    seconds, count = sum(delta.seconds for delta in recent), arrivals(recent)
    return max(0.0, count - standard_errors * math.sqrt(count)) / seconds if seconds > 0 else 0.0


def arrivals(window: Iterable[Delta]) -> float:
    """Return the number of requests that arrived in ``window``."""
    return sum(max(0.0, sums.arrivals) for delta in window for sums in delta.traffic.values())


# Capacity of one worker: the largest arrival rate of the observed mix at which every objective is met.
#
# At an arrival rate the number of running sequences b settles where b = rate * output * t(b) / E, with t(b) the step
# time and E the expected tokens per step; each step also reads rate * prompt * t(b) prompt tokens. Rate and prompt
# tokens both follow from b, since a step ends b * E / output requests and as many start. The search therefore goes over
# b. The draft shape is chosen again for each b, so shapes grow shallower before workers are added.

Limit = Literal["slots", "itl", "ttft", "cache"]
"""The limit that a worker reaches first, as in types.Capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The mean request."""

    prompt_tokens: float
    """Prompt tokens to compute, without those that the prefix cache has."""
    output_tokens: float
    context_tokens: float
    """Mean number of cached tokens while the request runs."""
    prompt_steps: int = 1
    """Steps that read the prompt."""
    prompt_seconds: float = 0
    """Seconds that reading the prompt adds to each of these steps."""
    prompt_busy_seconds: float = 0
    """Time for which a prompt keeps the worker busy that computes it, which may be another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one worker, and objectives of the deployment."""

    max_sequences: int
    cache_tokens: float | None = None
    itl_seconds: float | None = None
    ttft_seconds: float | None = None


def waiting_seconds(offered: float, slots: int, service_seconds: float) -> float:
    """Return the mean wait for a slot in seconds, by Erlang C.

    Args:
        offered: Mean number of busy slots.
        slots: Number of slots.
        service_seconds: Mean time that a request occupies its slot.

    Returns:
        Infinity if all slots are always busy.
    """
    if offered >= slots:
        return math.inf
    blocked = 1.0
    for slot in range(1, slots + 1):
        blocked = offered * blocked / (slot + offered * blocked)
    waits = blocked / (1 - offered / slots * (1 - blocked))
    return waits * service_seconds / (slots - offered)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """The mean request, and one worker that serves it."""

    mix: Mix
    step_model: StepModel
    """Step times of the worker."""
    limits: Limits
    standard_errors: float = 0
    """Number of standard errors by which steps are assumed to be slower than their mean."""

    def capacity(self) -> Capacity:
        """Return the capacity of the worker: the mean, or with standard errors a lower confidence bound."""
        within: list[Capacity] = []
        most, last = self._most_sequences()
        for sequences in _grid(most):
            point, missed = self._point(sequences)
            if missed is not None:
                return self._bisect(within, point, missed)
            within.append(point)
        return replace(_fastest(within), limited_by=last)

    def _most_sequences(self) -> tuple[float, Limit]:
        """Return the sequences that slots and cache have room for, at least one, and the smaller of the two limits."""
        share = TUNING.usable_slots if self.limits.ttft_seconds is None else 1.0
        slots = share * self.limits.max_sequences
        cache_tokens = self.limits.cache_tokens
        cache = TUNING.usable_cache * cache_tokens / self.mix.context_tokens if cache_tokens else math.inf
        return (max(1.0, cache), "cache") if cache < slots else (max(1.0, slots), "slots")

    def _bisect(self, within: list[Capacity], outside: Capacity, limit: Limit) -> Capacity:
        """Search between the last point that meets the objectives and the first that misses one."""
        if not within:
            return replace(outside, limited_by=limit, attainable=False)
        low, high = within[-1].sequences, outside.sequences
        for _ in range(TUNING.bisections):
            point, missed = self._point((low + high) / 2)
            if missed is None:
                low = point.sequences
                within.append(point)
            else:
                high, limit = point.sequences, missed
        return replace(_fastest(within), limited_by=limit)

    def _point(self, sequences: float) -> tuple[Capacity, Limit | None]:
        """Return the steady state with ``sequences`` running, and the objective that it misses."""
        without_prompts = self.step_model(sequences, 0.0)
        ended = sequences * without_prompts.tokens / self.mix.output_tokens
        step = self.step_model(sequences, ended * self.mix.prompt_tokens)
        seconds = step.seconds * math.exp(min(TUNING.max_log_error, self.standard_errors * step.error))
        rate = sequences * step.tokens / (self.mix.output_tokens * seconds)
        point = Capacity(rate=rate, sequences=sequences, step_seconds=seconds, limited_by="slots")
        return point, _missed(sequences, seconds, step, self.mix, self.limits)


def _fastest(points: list[Capacity]) -> Capacity:
    return max(points, key=lambda point: point.rate)


def _grid(most: float) -> Iterator[float]:
    """Return the numbers of sequences to try: 1, 2, 3, 4, 6, 8, 12, ... and ``most``."""
    edge = 1.0
    while edge < most:
        yield edge
        if edge >= 2 and edge * 1.5 < most:
            yield edge * 1.5
        edge *= 2
    yield most


def _missed(sequences: float, seconds: float, step: StepEstimate, mix: Mix, limits: Limits) -> Limit | None:
    """Return the objective that is missed with ``sequences`` running. Return None if all are met."""
    if limits.itl_seconds is not None and seconds / step.least_tokens > limits.itl_seconds:
        return "itl"
    if limits.ttft_seconds is None:
        return None
    service = mix.output_tokens * seconds / step.tokens
    first = 0.5 * seconds + mix.prompt_steps * (seconds + mix.prompt_seconds)
    if first > limits.ttft_seconds:
        return "ttft"
    wait = waiting_seconds(sequences, limits.max_sequences, service)
    return "slots" if first + wait > limits.ttft_seconds else None
