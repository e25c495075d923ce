"""Relative speed of workers from the step times that they report, for workers on other hardware.

Only steps of one kind (tokens, draft passes, prefill, context) are compared, so a worker with longer prompts does not
count as a slow one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

StepKind = tuple[int, int, bool, int]
"""Bucket of packed tokens, draft passes, prefill or not, bucket of context: the key of a ``StepCell``."""

MIN_STEPS_OF_A_KIND = 16
"""Steps of a kind that a worker must have run before they are compared."""
MIN_COMPARED_STEPS = 100
"""Compared steps from which on a worker has a speed of its own."""
MAX_STEPS_OF_A_KIND = 1000
"""Steps of a kind beyond which its weight among the kinds does not grow."""
RATIO = 1.25
"""Ratio of two neighbouring speeds. A finer speed would move conversations away from their caches for noise."""
HYSTERESIS = 0.75
"""Steps of ``RATIO`` by which a measured speed differs from the one in use before that changes."""
MAX_STEPS_OF_RATIO = 10
"""Bound of a speed: a factor of 9.3 up or down."""
INTERVAL_SECONDS = 10.0
"""Time between two comparisons."""


class StepSums(NamedTuple):
    """Number of steps of one kind since the worker's start, and their seconds."""

    steps: int
    seconds: float


class StepSpeeds:
    """Speeds in use. A speed is a power of ``RATIO``, 1 without enough steps that can be compared."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._compared_at = clock, -math.inf
        self._sums: dict[str, Mapping[StepKind, StepSums]] = {}
        self._exponents: dict[str, int] = {}

    def of(self, worker: str) -> float:
        """Return the speed of a worker relative to the others."""
        return float(RATIO ** self._exponents.get(worker, 0))

    def record(self, worker: str, sums: Mapping[StepKind, StepSums]) -> None:
        """Record the step times of a report. Workers are compared every ``INTERVAL_SECONDS``."""
        self._sums[worker] = sums
        now = self._clock()
        if now >= self._compared_at + INTERVAL_SECONDS:
            self._compared_at = now
            for name, speed in relative_speeds(self._sums).items():
                self._use(name, math.log(speed, RATIO))

    def retain(self, workers: Collection[str]) -> None:
        """Remove all workers but these."""
        self._sums = {name: sums for name, sums in self._sums.items() if name in workers}
        self._exponents = {name: exponent for name, exponent in self._exponents.items() if name in workers}

    def _use(self, worker: str, measured: float) -> None:
        if abs(measured - self._exponents.get(worker, 0)) > HYSTERESIS:
            self._exponents[worker] = max(-MAX_STEPS_OF_RATIO, min(round(measured), MAX_STEPS_OF_RATIO))


def relative_speeds(sums: Mapping[str, Mapping[StepKind, StepSums]]) -> dict[str, float]:
    """Return the speed of each worker that has enough steps in common with another one.

    It is the weighted geometric mean, over the kinds of steps, of the mean step time of all workers with that kind
    over the worker's own.
    """
    logs: dict[StepKind, dict[str, float]] = {}
    for name, by_kind in sums.items():
        for kind, (steps, seconds) in by_kind.items():
            if steps >= MIN_STEPS_OF_A_KIND and seconds > 0:
                logs.setdefault(kind, {})[name] = math.log(seconds / steps)
    speeds = {}
    for name, by_kind in sums.items():
        gains = weights = 0.0
        for kind in by_kind:
            times = logs.get(kind, {})
            if name in times and len(times) > 1:
                weight = min(by_kind[kind].steps, MAX_STEPS_OF_A_KIND)
                gains += weight * (sum(times.values()) / len(times) - times[name])
                weights += weight
        if weights >= MIN_COMPARED_STEPS:
            speeds[name] = math.exp(gains / weights)
    return speeds
