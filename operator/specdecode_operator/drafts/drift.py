"""Drift of a draft: its baseline, the evidence against it, and whether training is worth it. Pure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from specdecode_operator.drafts.crossover import TILTS, increments, log_mean

# Cost of a token in steps of a chain of three, from the acceptance counts of the main path.
#
# A count at depth d says how often the target took the draft's token there, given that it took those before. The
# product of the rates is therefore the same whatever shape was planned, and whether a draft was verified or scored in
# the shadow. A depth that the plan seldom reaches follows the first one, in the ratio that was known while the baseline
# was learnt.

CHAIN = 3
"""Draft tokens of the chain. It is short enough to be measured at most loads, and long enough to show a stale draft."""
LEAST_POSITIONS = 100.0
"""Positions at depth 1 that a batch needs, and positions at a deeper depth from which its ratio to the first counts."""
CARRIED_POSITIONS = 20.0
"""Weight of the known ratio against a batch's own counts, in positions. With some hundred positions a batch shows its
own rate; a plan of depth 1 leaves the known ratio alone."""
EPSILON = 0.001
"""Distance of every rate from 0 and 1."""

_NONE = (0.0,) * CHAIN


@dataclass(frozen=True, slots=True)
class ChainCounts:
    """Accepted and all tokens at depths 1 to CHAIN of the main path."""

    hits: tuple[float, ...] = _NONE
    totals: tuple[float, ...] = _NONE

    def plus(self, other: ChainCounts) -> ChainCounts:
        """Return the sums of both."""
        return ChainCounts(
            tuple(one + two for one, two in zip(self.hits, other.hits, strict=True)),
            tuple(one + two for one, two in zip(self.totals, other.totals, strict=True)),
        )

    @property
    def is_enough(self) -> bool:
        """True if a batch can be made of these counts."""
        return self.totals[0] >= LEAST_POSITIONS


def log_cost(counts: ChainCounts, known: ChainCounts) -> float:
    """Return the logarithm of the steps per token of a chain of three.

    Args:
        counts: Counts of one batch, with at least one position at depth 1.
        known: Counts from which the ratios of the deeper rates to the first one follow.
    """
    first = _rate(counts.hits[0], counts.totals[0])
    tokens, survival = 1 + first, first
    for depth in range(1, CHAIN):
        survival *= _deeper(counts, known, first, depth)
        tokens += survival
    return -math.log(tokens)


def _deeper(counts: ChainCounts, known: ChainCounts, first: float, depth: int) -> float:
    """Return the rate at an index above 0. Without a known ratio it is that of the first token, whatever was counted.

    Otherwise a plan that reaches a depth for the first time would look like another draft.
    """
    if min(known.totals[depth], known.totals[0]) < LEAST_POSITIONS:
        return first
    ratio = _rate(known.hits[depth], known.totals[depth]) / _rate(known.hits[0], known.totals[0])
    carried = CARRIED_POSITIONS * min(1.0, first * ratio)
    return _rate(counts.hits[depth] + carried, counts.totals[depth] + CARRIED_POSITIONS)


def _rate(hits: float, total: float) -> float:
    return min(1 - EPSILON, max(EPSILON, hits / total))


# Normal cost of a task by half hour of the day.
#
# It is learnt over days and then frozen, until draft, target or image changes.

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
        return statistics.stdev(means) if len(means) > 1 else 0.0


def slot_of(at: float) -> int:
    """Return the half hour of the day (UTC) of a time."""
    return int(at % DAY_SECONDS * SLOTS / DAY_SECONDS)


def _with(values: tuple[float, ...], slot: int, more: float) -> tuple[float, ...]:
    """Return the values with ``more`` added at one slot."""
    return (*values[:slot], values[slot] + more, *values[slot + 1 :])


# Worth of a distillation run: device time that it is expected to save, against the device time that it takes.

COST_FACTOR = 2.0
"""Least ratio of saved to spent device time. The saving is an estimate, and the run competes with serving."""
FIRST_RECOVERY = 0.5
"""Share of a loss that a run is expected to recover before any run of this deployment showed a figure."""


@dataclass(frozen=True, slots=True)
class Worth:
    """The sum behind a decision to train. Times are device seconds over the payback period."""

    lost_seconds: float
    saved_seconds: float
    needed_seconds: float

    @property
    def is_worth_it(self) -> bool:
        """True if the expected saving exceeds what is needed."""
        return self.saved_seconds > self.needed_seconds

    def sentence(self) -> str:
        """Return the sum in words, for the condition DraftFresh and the reason of a run."""
        relation = "more" if self.is_worth_it else "not more"
        return (
            f"stale drafts cost {_hours(self.lost_seconds)} of device time within the payback period; a run is "
            f"expected to save {_hours(self.saved_seconds)}, {relation} than twice the last run's device time "
            f"({_hours(self.needed_seconds)})"
        )


def _hours(seconds: float) -> str:
    """Return a duration in hours with one digit."""
    return f"{seconds / 3600:.1f} h"


# Detection of stale drafts: a sequential detector of rising cost per token, task by task.
#
# A batch of requests gives one number, the log cost of a token: steps per token of a chain of three (`log_cost`: from
# the main-path counters, so that it does not move with the planned depth) times the known cost of a step. A step counts
# as long as in the baseline, so its cost cancels out: a higher load or a slower node is no stale draft. The detector
# watches how far the cost exceeds the baseline of that half hour.
#
# It is a Shiryaev-Roberts e-detector: M_n = sum over j of the product of e-values from batch j to n, which is updated
# as M_n = (M_(n-1) + 1) x e_n, and raises an alarm at M_n >= A. As long as the loss does not exceed the accepted one,
# M_n - n is a supermartingale, so that A batches pass on average before a false alarm. A is the number of batches in a
# month. `crossover` has the e-values; they assume symmetric noise around the baseline, not its size.
#
# References:
#     Shin, Ramdas and Rinaldo, "E-detectors: a nonparametric framework for sequential change detection", 2022 (arXiv
#     2203.03532).
#     Pollak, "Optimal detection of a change in distribution", Annals of Statistics 13, 1985.

BATCH_REQUESTS = 20
"""Finished requests of a task in one batch. The log evidence of a batch is at most one half, so batches are small.
Smaller ones would depend on each other, since the load of a worker changes slowly.
"""
ACCEPTED_LOSS = 0.05
"""Share of the speed that a task may lose against its baseline: a smaller loss is worth no run. A trade."""
DAY_MARGIN = 1.5
"""Standard deviations between days that are accepted in addition to ``ACCEPTED_LOSS``. Without this margin, every slow
day would be an alarm wherever days differ as much as that.
"""


@dataclass(frozen=True, slots=True)
class DriftDetector:
    """Log of the detector's sum for each tilt, since the last alarm or the last baseline."""

    logs: tuple[float, ...] = (-math.inf,) * len(TILTS)
    batches: int = 0

    def add(self, excess: float) -> DriftDetector:
        """Add one batch. ``excess`` is the loss beyond the accepted one, in standard deviations of a batch."""
        logs = tuple(_log_plus_one(log) + step for log, step in zip(self.logs, increments(excess), strict=True))
        return DriftDetector(logs, self.batches + 1)

    @property
    def log_evidence(self) -> float:
        """Log of the mean of the sums. It is compared with the log of the batches between false alarms."""
        return log_mean(self.logs) if self.batches else -math.inf

    def alarms(self, batches_between: float) -> bool:
        """Return whether the loss is shown, with one false alarm in ``batches_between`` batches on average."""
        return self.log_evidence >= math.log(batches_between)


def excess_loss(baseline: Baseline, at: float, log_cost: float) -> float:
    """Return how far a batch exceeds the baseline plus the accepted loss, in standard deviations.

    Args:
        baseline: Learnt baseline of the task.
        at: Time of the batch in seconds since the epoch.
        log_cost: Log of the batch's cost per token.
    """
    accepted = -math.log1p(-ACCEPTED_LOSS) + DAY_MARGIN * baseline.day_deviation
    return (log_cost - baseline.expected(at) - accepted) / baseline.deviation


def batches_between_alarms(baseline: Baseline, tasks: int) -> float:
    """Return the threshold that lets all ``tasks`` together raise one false alarm a month on average."""
    return max(baseline.batches_per_month * max(tasks, 1), 1.0)


def _log_plus_one(log: float) -> float:
    """Return log(1 + x) for x given by its logarithm."""
    return max(log, 0.0) + math.log1p(math.exp(-abs(log)))
