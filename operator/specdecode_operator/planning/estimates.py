"""Estimates, forgetting, and change points. Pure.

Evidence is a sum of observations that decays by the slower of two clocks, observations and seconds: a busy fleet
averages over about ten seconds, a quiet one over a few hundred observations. New evidence is also counted apart. Once
it contradicts the older evidence, the older loses most of its weight, so that a step reaches the plan at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple, TypeVar

from specdecode_operator.planning.tuning import TUNING
from specdecode_operator.telemetry.counters import Hits, Moments

Evidence = TypeVar("Evidence", Hits, Moments)
NORMAL = NormalDist()


class Estimate(NamedTuple):
    """An estimated quantity: an acceptance rate, or a step time in seconds."""

    mean: float
    variance: float
    weight: float = 0
    """Effective number of samples; 0 means that it was never measured itself."""
    at: float = 0
    """Time of the last measurement on the operator's clock, in seconds."""

    @property
    def odds(self) -> float:
        """Odds of a rate."""
        return self.mean / (1 - self.mean)

    @property
    def relative_variance(self) -> float:
        """Variance of the logarithm."""
        return self.variance / self.mean**2


def mean_time(parts: Sequence[tuple[float, Estimate]]) -> Estimate:
    """Return the mean of step times, whose errors go together. It is timed if the batches that matter are."""
    if len(parts) == 1:
        return parts[0][1]
    heaviest = max(weight for weight, _ in parts)
    often = [seconds for weight, seconds in parts if weight >= heaviest / 2]
    mean = sum(weight * seconds.mean for weight, seconds in parts)
    error = sum(weight * math.sqrt(seconds.variance) for weight, seconds in parts)
    return Estimate(mean, error**2, min(one.weight for one in often), min(one.at for one in often))


def confidence(gain: float, error: float) -> float:
    """Return P(gain > 0), with the gain taken as normal."""
    return NORMAL.cdf(gain / error) if error > 0 else float(gain > 0)


def joined(
    before: Evidence, gathered: Evidence, fresh: Evidence, keep: float, changed: Callable[[Evidence, Evidence], bool]
) -> tuple[Evidence, Evidence, bool]:
    """Return all evidence, its new part, and whether the new part contradicts the older.

    Args:
        before: Evidence so far.
        gathered: The part of ``before`` that is still new.
        fresh: Evidence of this poll.
        keep: Share of ``before`` that is not forgotten.
        changed: Test for a change point.
    """
    older, new = before.minus(gathered).times(keep), gathered.times(keep).plus(fresh)
    contradicted = changed(older, new)
    if contradicted:
        older = older.times(min(1, TUNING.contradicted_weight * new.weight / older.weight))
    return older.plus(new), new, contradicted


def kept_share(count: float, seconds: float, half_life: float) -> float:
    """Return the share of old evidence that stays after ``count`` observations in ``seconds``."""
    return float(0.5 ** min(count / half_life, max(0.0, seconds) / TUNING.recent_seconds))


def rate_changed(before: Hits, fresh: Hits, effect: float = 1.0) -> bool:
    """Return whether two samples can hardly have one rate, by their likelihood ratio.

    ``effect`` drafts count as one, because the tokens of one request resemble each other.
    """
    if min(before.total, fresh.total) < TUNING.min_samples:
        return False
    ratio = _log_likelihood(before) + _log_likelihood(fresh) - _log_likelihood(before.plus(fresh))
    return 2 * ratio > TUNING.rate_change_errors**2 * max(2.0, effect)


def time_changed(before: Moments, fresh: Moments, wander: float = 0.0) -> bool:
    """Return whether steps of one kind take another time now.

    ``wander`` is the relative variance of a poll's mean beyond the noise of its steps.
    """
    if min(before.count, fresh.count) < TUNING.min_samples:
        return False
    gap = abs(before.mean_seconds - fresh.mean_seconds)
    error = before.variance / before.count + fresh.variance / fresh.count + wander * before.mean_seconds**2
    return gap > max(TUNING.time_change_errors * math.sqrt(error), TUNING.carried_error * before.mean_seconds)


def _log_likelihood(sample: Hits) -> float:
    return sum(part * math.log(part / sample.total) for part in (sample.hits, sample.total - sample.hits) if part > 0)
