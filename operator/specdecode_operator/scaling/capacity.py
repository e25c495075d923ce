"""What one worker carries: the largest arrival rate of the observed mix at which every promise is kept.

At a rate the running sequences b settle where b = rate * output * t(b) / E, with rate * prompt * t(b) prompt tokens
read in each step. Both follow from b: a step ends b * E / output requests, and as many begin. So
the search goes over b, and the shape is chosen anew at each, which is why shapes grow shallower before workers are
added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from specdecode_operator.types import Capacity

SLOTS_USABLE = 0.8
"""Share of a worker's sequences that is planned for where nothing is promised of waiting; the rest is for bursts."""
CACHE_USABLE = 0.9
"""Share of the KV cache that is planned for: contexts differ, and prefixes are kept."""
HALVINGS = 6
"""Of the last interval of sequences; its edges are at most half of them apart, so this leaves one in a hundred."""

MOST_DOUBT = 5.0
"""A step that might as well take 150 times as long is not known at all; more makes no difference."""

Limit = Literal["slots", "itl", "ttft", "cache"]
"""As in records.Capacity."""


class Step(Protocol):
    """A step of b sequences with the shape that is best there."""

    @property
    def seconds(self) -> float: ...
    @property
    def tokens(self) -> float:
        """Expected of one sequence, the mean over the tasks."""
        ...

    @property
    def least_tokens(self) -> float:
        """Of the task that gets fewest."""
        ...

    @property
    def error(self) -> float:
        """Standard error of log(seconds / tokens)."""
        ...


class Pace(Protocol):
    def __call__(self, sequences: float, prompt_tokens: float) -> Step:
        """``prompt_tokens`` are read in the same step, on average."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The mean request."""

    prompt_tokens: float
    """To be read: what the cache had is not in it."""
    output_tokens: float
    context_tokens: float
    """In the cache while it runs, on average."""
    prompt_steps: int = 1
    """Steps over which the prompt is read."""
    prompt_seconds: float = 0
    """What reading adds to each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one worker, and what was promised."""

    max_sequences: int
    cache_tokens: float | None = None
    itl_seconds: float | None = None
    ttft_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class _Point:
    sequences: float
    rate: float
    seconds: float
    broken: Limit | None


def capacity(mix: Mix, pace: Pace, limits: Limits, *, doubt: float = 0) -> Capacity:
    """``doubt`` is how many standard errors slower a step is taken to be: 0 is the mean, more is a lower bound."""
    kept: list[_Point] = []
    most, last = _most(mix, limits)
    for sequences in _grid(most):
        point = _at(sequences, mix, pace, limits, doubt)
        if point.broken is not None:
            return _between(kept, point, mix, pace, limits, doubt)
        kept.append(point)
    best = max(kept, key=lambda point: point.rate)
    return _capacity(best, last)


def _most(mix: Mix, limits: Limits) -> tuple[float, Limit]:
    """Sequences that there is room for, whatever their pace, and what of; one at the least."""
    share = SLOTS_USABLE if limits.ttft_seconds is None else 1.0
    slots = share * limits.max_sequences
    cache = CACHE_USABLE * limits.cache_tokens / mix.context_tokens if limits.cache_tokens else math.inf
    return (max(1.0, cache), "cache") if cache < slots else (max(1.0, slots), "slots")


def _between(kept: list[_Point], broken: _Point, mix: Mix, pace: Pace, limits: Limits, doubt: float) -> Capacity:
    """Bisects between the last load that keeps its promises and the first that breaks one."""
    assert broken.broken is not None
    if not kept:
        found = _capacity(broken, broken.broken)
        return Capacity(
            rate=found.rate,
            sequences=found.sequences,
            step_seconds=found.step_seconds,
            limited_by=broken.broken,
            attainable=False,
        )
    low, high, limit = kept[-1].sequences, broken.sequences, broken.broken
    for _ in range(HALVINGS):
        point = _at((low + high) / 2, mix, pace, limits, doubt)
        if point.broken is None:
            low = point.sequences
            kept.append(point)
        else:
            high, limit = point.sequences, point.broken
    return _capacity(max(kept, key=lambda point: point.rate), limit)


def _capacity(point: _Point, limit: Limit) -> Capacity:
    return Capacity(rate=point.rate, sequences=point.sequences, step_seconds=point.seconds, limited_by=limit)


def _grid(most: float) -> Iterator[float]:
    """1, 2, 3, 4, 6, 8, 12, ... and the most that run."""
    edge = 1.0
    while edge < most:
        yield edge
        if edge >= 2 and edge * 1.5 < most:
            yield edge * 1.5
        edge *= 2
    yield most


def _at(sequences: float, mix: Mix, pace: Pace, limits: Limits, doubt: float) -> _Point:
    """The fixed point with so many sequences running."""
    alone = pace(sequences, 0.0)
    ended = sequences * alone.tokens / mix.output_tokens
    step = pace(sequences, ended * mix.prompt_tokens)
    seconds = step.seconds * math.exp(min(MOST_DOUBT, doubt * step.error))
    rate = sequences * step.tokens / (mix.output_tokens * seconds)
    return _Point(sequences, rate, seconds, _broken(sequences, seconds, step, mix, limits))


def _broken(sequences: float, seconds: float, step: Step, mix: Mix, limits: Limits) -> Limit | None:
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


def waiting_seconds(offered: float, slots: int, service_seconds: float) -> float:
    """Mean wait for a slot: Erlang C, with ``offered`` slots busy on average; infinite when all always are."""
    if offered >= slots:
        return math.inf
    blocked = 1.0
    for slot in range(1, slots + 1):
        blocked = offered * blocked / (slot + offered * blocked)
    waits = blocked / (1 - offered / slots * (1 - blocked))
    return waits * service_seconds / (slots - offered)
