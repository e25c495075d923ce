"""Normal cost of a task by half hour of the day.

It is learnt over days and then frozen, until draft, target or image changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DAY_SECONDS = 86_400
SLOTS = 48
"""Half hours of a day."""
LEARNING_DAYS = 7
"""Whole days from which a baseline is learnt unless the spec says otherwise: one of each weekday."""
LEARNING_SECONDS = LEARNING_DAYS * DAY_SECONDS
LEAST_BATCHES = 30
"""Batches that a baseline needs. With fewer, learning goes on after the set time: the deviation of a batch, which is
the unit of all evidence, would err by more than an eighth."""
NEIGHBOUR_WEIGHT = 8.0
"""Weight, in batches, of the half hours around one, so that a quiet half hour is not judged by a few batches."""
FIRST_DEVIATION = 0.1
"""Standard deviation of a batch's log cost where no half hour has two batches."""
_EMPTY = (0.0,) * SLOTS


@dataclass(frozen=True, slots=True)
class Baseline:
    """Frozen baseline of a task: log cost by half hour, and how far batches and days lie from it."""

    costs: tuple[float, ...]
    """Log cost per token of each half hour of the day."""
    deviation: float
    """Standard deviation of a batch's log cost within its half hour."""
    day_deviation: float
    """Standard deviation of the daily means of log cost."""
    batches_per_month: float

    def expected(self, at: float) -> float:
        """Return the log cost that is normal at this time of the day."""
        return self.costs[slot_of(at)]


@dataclass(frozen=True, slots=True)
class LearningBaseline:
    """Sums of log cost by half hour. ``began`` is the time of the first batch in seconds since the epoch."""

    began: float | None = None
    counts: tuple[float, ...] = _EMPTY
    sums: tuple[float, ...] = _EMPTY
    squares: tuple[float, ...] = _EMPTY
    days: tuple[tuple[float, float], ...] = ()
    """Count and sum of log cost of each day since ``began``."""

    def add(self, at: float, log_cost: float, seconds: float = LEARNING_SECONDS) -> LearningBaseline:
        """Learn one batch that ended at ``at``, in a baseline of ``seconds``.

        Batches of a complete baseline are ignored, because their day would count as a whole one.
        """
        if self.is_complete(at, seconds):
            return self
        slot = slot_of(at)
        began = at if self.began is None else self.began
        days = list(self.days)
        days += [(0.0, 0.0)] * (int((at - began) / DAY_SECONDS) + 1 - len(days))
        count, total = days[-1]
        days[-1] = count + 1, total + log_cost
        return LearningBaseline(
            began,
            _with(self.counts, slot, 1.0),
            _with(self.sums, slot, log_cost),
            _with(self.squares, slot, log_cost * log_cost),
            tuple(days),
        )

    def is_complete(self, now: float, seconds: float = LEARNING_SECONDS) -> bool:
        """Return whether ``seconds`` have passed since the first batch, and there were LEAST_BATCHES."""
        if self.began is None or now - self.began < seconds:
            return False
        return sum(self.counts) >= LEAST_BATCHES

    def freeze(self, seconds: float = LEARNING_SECONDS) -> Baseline:
        """Return the baseline that was learnt in ``seconds``. At least one batch must have been learnt."""
        return Baseline(
            costs=tuple(self._cost(slot) for slot in range(SLOTS)),
            deviation=self._deviation(),
            day_deviation=self._day_deviation(),
            batches_per_month=sum(self.counts) * 30 * DAY_SECONDS / seconds,
        )

    def _cost(self, slot: int) -> float:
        """Return the mean log cost of a half hour, drawn towards that of the half hours around it."""
        near = [(slot + step) % SLOTS for step in (-2, -1, 1, 2)]
        around_count = sum(self.counts[index] for index in near)
        if around_count == 0:
            near = list(range(SLOTS))
            around_count = sum(self.counts)
        around = sum(self.sums[index] for index in near) / around_count
        return (self.sums[slot] + NEIGHBOUR_WEIGHT * around) / (self.counts[slot] + NEIGHBOUR_WEIGHT)

    def _deviation(self) -> float:
        """Return the standard deviation within half hours, pooled over the day."""
        within, freedom = 0.0, 0.0
        for count, total, square in zip(self.counts, self.sums, self.squares, strict=True):
            if count > 1:
                within += max(0.0, square - total * total / count)
                freedom += count - 1
        return max(math.sqrt(within / freedom), 1e-3) if freedom else FIRST_DEVIATION

    def _day_deviation(self) -> float:
        """Return the standard deviation of the daily means."""
        means = [total / count for count, total in self.days if count]
        if len(means) < 2:
            return 0.0
        centre = sum(means) / len(means)
        return math.sqrt(sum((mean - centre) ** 2 for mean in means) / (len(means) - 1))


def slot_of(at: float) -> int:
    """Return the half hour of the day (UTC) of a time."""
    return int(at % DAY_SECONDS * SLOTS / DAY_SECONDS)


def _with(values: tuple[float, ...], slot: int, more: float) -> tuple[float, ...]:
    """Return the values with ``more`` added at one slot."""
    return (*values[:slot], values[slot] + more, *values[slot + 1 :])
