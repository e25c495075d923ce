"""Traces: requests and faults of a fleet over time. Every trace is one ``Trace``, drawn by seed.

Times are seconds from the start. Curves that shape a whole trace are given in shares of its length, so that a short
run has the same form; what has a natural length (a dwell, a burst) is in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from specdecode_simulator.records.acceptance_walks import Records
from specdecode_simulator.traces.job import Job, Limits

Array = Any
Curve = Callable[[float], float]
"""A value by seconds from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One sort of request: what its text is like, how long it is, and the label that it comes with."""

    domain: str
    label: str = "other"
    quality: Curve = lambda t: 0.0
    beyond: tuple[float, ...] = ()
    """Shifts of the quality by context bucket: a draft knows contexts of the lengths that it was trained on."""
    prompt: float = 160.0
    output: float = 160.0
    spread: float = 0.5
    """Standard deviation of the logarithm of both lengths."""
    prompt_growth: Curve = lambda t: 1.0
    mislabelled: float = 0.0
    """Share that comes with the first label of another kind."""

    def quality_at(self, seconds: float, context: int) -> float:
        """Return the quality at a time, in a context bucket."""
        return self.quality(seconds) + (self.beyond[min(context, len(self.beyond) - 1)] if self.beyond else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """``rate`` is requests a second for the whole fleet; ``mix`` gives the weights of the kinds."""

    name: str
    family: str
    """stationary, shifting, fault or scaling."""
    seconds: float
    table: str
    kinds: tuple[Kind, ...]
    rate: Curve
    mix: Callable[[float], tuple[float, ...]] = lambda t: (1.0,)
    limits: Limits = field(default_factory=Limits)
    replicas: int = 1
    most_replicas: int = 1
    """Above ``replicas`` the fleet is scaled."""
    startup_seconds: float = 90.0
    factor: Callable[[int, float], float] = lambda pod, t: 1.0
    """Factor on a pod's step times."""
    tables: Callable[[int], str | None] = lambda pod: None
    """Another table for this pod."""
    lost: Callable[[int, float], float] = lambda pod, t: 0.0
    """Chance that a report does not arrive."""
    away: Callable[[float], bool] = lambda t: False
    """The operator is not there."""
    capacity: Curve = lambda t: 1e9
    """Pods that the cluster has room for."""
    patience_seconds: float = 1e9
    """Clients that wait longer for a first token give up and ask again, twice."""
    ttft_seconds: float = 5.0
    ttit_seconds: float = 1.0
    steps_at: tuple[float, ...] = ()
    """When acceptance steps, for the time to an answer."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of tasks, the unnamed last."""
        named = tuple(dict.fromkeys(kind.label for kind in self.kinds if kind.label != "other"))
        return (*named, "other")

    @property
    def is_scaled(self) -> bool:
        return self.most_replicas > self.replicas


@dataclass(frozen=True, slots=True)
class Demand:
    """All requests of one seed, by arrival, with a coin each that picks a worker."""

    jobs: tuple[Job, ...]
    coins: tuple[float, ...]


@lru_cache(maxsize=1)
def demand(trace: Trace, records: Records, seed: int) -> Demand:
    """Open loop: Poisson arrivals second by second, whatever the fleet makes of them; one draw for all policies."""
    generator = np.random.default_rng([seed, sum(map(ord, trace.name))])
    whole = np.arange(int(trace.seconds))
    counts = generator.poisson([max(0.0, trace.rate(float(t))) for t in whole])
    times = np.sort(np.repeat(whole, counts) + generator.random(int(counts.sum())))
    coins = generator.random((len(times), 3))
    normals = generator.standard_normal((len(times), 2))
    labels = {label: index for index, label in enumerate(trace.labels)}
    jobs = [
        _job(trace, records, labels, index, float(time), coins[index], normals[index])
        for index, time in enumerate(times)
    ]
    return Demand(tuple(jobs), tuple(generator.random(len(times)).tolist()))


def _job(
    trace: Trace, records: Records, labels: dict[str, int], index: int, time: float, coins: Array, normals: Array
) -> Job:
    weights = np.cumsum(trace.mix(time))
    which = int(np.searchsorted(weights, coins[0] * weights[-1], side="right"))
    kind = trace.kinds[min(which, len(trace.kinds) - 1)]
    answers = records.answers[kind.domain]
    begin, length = answers[int(coins[1] * len(answers))]
    label = kind.label
    if coins[2] < kind.mislabelled:
        label = next(other.label for other in trace.kinds if other.label != kind.label)
    most = trace.limits.kv_tokens // 2
    prompt = kind.prompt * kind.prompt_growth(time) * np.exp(kind.spread * normals[0] - kind.spread**2 / 2)
    output = kind.output * np.exp(kind.spread * normals[1] - kind.spread**2 / 2)
    return Job(
        id=index,
        arrived=time,
        label=labels[label],
        kind=which,
        prompt=int(min(max(prompt, 8), most)),
        output=int(min(max(output, 4), most)),
        root=begin + int(coins[1] * 7919) % length,
    )


# --- curves ---------------------------------------------------------------------------------------------------------


def flat(value: float) -> Curve:
    return lambda t: value


def knots(seconds: float, *points: tuple[float, float]) -> Curve:
    """Straight lines between (share of ``seconds``, value)."""
    at, values = [share * seconds for share, _ in points], [value for _, value in points]
    return lambda t: float(np.interp(t, at, values))


def wave(period: float, low: float, high: float) -> Curve:
    """A sine that begins at ``low``."""
    return lambda t: low + (high - low) * 0.5 * (1 - float(np.cos(2 * np.pi * t / period)))


def square(period: float, low: float, high: float, share: float = 0.5) -> Curve:
    """``high`` for the last ``share`` of every period."""
    return lambda t: high if (t / period) % 1.0 >= 1 - share else low
