"""Trials of the drift detector on traffic with daily cycles: false alarms, and requests until a fall is detected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdecode_operator.drafts.drift import (
    BATCH_REQUESTS,
    DAY_SECONDS,
    LEARNING_DAYS,
    Baseline,
    DriftDetector,
    LearningBaseline,
    batches_between_alarms,
    excess_loss,
)
from specdecode_simulator.drafts.request_costs import DEFAULT_NOISE, CostNoise, draw_requests

CYCLE = 0.15
"""Amplitude of log cost over the day: other prompts at night, other batch sizes at noon."""
DAY_SPREAD = 0.02
"""Standard deviation of a whole day's log cost."""
RATE_CYCLE = 0.9
"""Amplitude of the arrival rate over the day, as a share of its mean."""

Batch = tuple[float, float]
"""Time in seconds, and log cost per token."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of one task. ``fall_at`` is the time from which the speed is lower by ``fall``."""

    requests_per_day: int
    fall: float = 0.0
    fall_at: float = float("inf")
    noise: CostNoise = DEFAULT_NOISE

    def batches(self, generator: Any, days: int) -> Iterator[Batch]:
        """Yield the batches of ``days`` days."""
        for day in range(days):
            yield from self._day(generator, day)

    def _day(self, generator: Any, day: int) -> list[Batch]:
        """Return the batches of one day. Requests that do not fill the day's last batch are dropped."""
        count = generator.poisson(self.requests_per_day)
        times = np.sort(_thinned(generator, count)) + day * DAY_SECONDS
        mean = CYCLE * np.sin(2 * np.pi * times / DAY_SECONDS) + DAY_SPREAD * generator.standard_normal()
        mean = mean - np.log1p(-self.fall) * (times >= self.fall_at)
        drawn = draw_requests(generator, count, self.noise, mean)
        whole = count // BATCH_REQUESTS * BATCH_REQUESTS
        seconds, tokens = (x[:whole].reshape(-1, BATCH_REQUESTS).sum(axis=1) for x in (drawn.seconds, drawn.tokens))
        ends = times[:whole].reshape(-1, BATCH_REQUESTS)[:, -1]
        return list(zip(ends.tolist(), np.log(seconds / tokens).tolist(), strict=True))


def count_false_alarms(days: int, requests_per_day: int, seed: int) -> tuple[int, float]:
    """Return the alarms in ``days`` stationary days after learning, and the promised batches between alarms."""
    generator = np.random.default_rng([seed, 1])
    batches = Traffic(requests_per_day).batches(generator, days + LEARNING_DAYS)
    baseline = _learn(batches)
    threshold = batches_between_alarms(baseline, tasks=1)
    detector, alarms = DriftDetector(), 0
    for at, log_cost in batches:
        detector = detector.add(excess_loss(baseline, at, log_cost))
        if detector.alarms(threshold):
            alarms, detector = alarms + 1, DriftDetector()
    return alarms, threshold


def requests_until_alarm(fall: float, requests_per_day: int, seed: int) -> int | None:
    """Return the requests from a fall of speed to the alarm, None for an alarm before it or none in five days."""
    generator = np.random.default_rng([seed, 2])
    fall_at = (LEARNING_DAYS + 1 + generator.random()) * DAY_SECONDS
    batches = Traffic(requests_per_day, fall, fall_at).batches(generator, LEARNING_DAYS + 7)
    baseline = _learn(batches)
    threshold = batches_between_alarms(baseline, tasks=1)
    detector, requests = DriftDetector(), 0
    for at, log_cost in batches:
        requests += BATCH_REQUESTS if at >= fall_at else 0
        detector = detector.add(excess_loss(baseline, at, log_cost))
        if detector.alarms(threshold):
            return requests or None
    return None


def _learn(batches: Iterator[Batch]) -> Baseline:
    """Take batches until a baseline is learnt."""
    learning = LearningBaseline()
    for at, log_cost in batches:
        learning = learning.add(at, log_cost)
        if learning.is_complete(at):
            break
    return learning.freeze()


def _thinned(generator: Any, count: int) -> Any:
    """Return ``count`` times of a day whose rate follows the daily cycle, lowest at midnight."""
    grid = np.linspace(0, DAY_SECONDS, 289)
    rate = 1 - RATE_CYCLE * np.cos(2 * np.pi * grid / DAY_SECONDS)
    mass = np.concatenate(([0.0], np.cumsum((rate[1:] + rate[:-1]) / 2)))
    return np.interp(generator.random(count) * mass[-1], mass, grid)
