"""Whether two samples can hardly be of one rate, or of one cost: a change, and no chance."""

from __future__ import annotations

import math

from specdecode_operator.telemetry.counters import Hits, Moments

SURPRISE = 4.0
"""Standard errors between two samples that count as a change."""
SURPRISE_OF_ALIKE = 3.0
"""The same where it is known how much drafts of one request resemble each other."""
LEAST_DRAFTS = 12
"""Fewer drafts say nothing about a rate: tokens of one request resemble each other."""
LEAST_STEPS = 6
"""Fewer steps say nothing about a mean."""
LEAST_STEP_SHIFT = 0.15
"""Relative change of a step time below which it counts as noise whatever its standard error."""


def rate_changed(before: Hits, fresh: Hits, effect: float = 1.0) -> bool:
    """Whether two samples of hits can hardly be of one rate, by the ratio of their likelihoods. So many drafts as
    ``effect`` says are worth one: an easy answer is no change of the draft.

    The ratio holds for few and rare hits too, where a normal approximation cries wolf.
    """
    if min(before.total, fresh.total) < LEAST_DRAFTS:
        return False
    apart = _log_likelihood(before) + _log_likelihood(fresh)
    return 2 * (apart - _log_likelihood(before.plus(fresh))) > max(SURPRISE**2, SURPRISE_OF_ALIKE**2 * effect)


def _log_likelihood(sample: Hits) -> float:
    """Of the sample under its own rate."""
    parts = (sample.hits, sample.total - sample.hits)
    return sum(part * math.log(part / sample.total) for part in parts if part > 0)


def cost_changed(before: Moments, fresh: Moments, wander: float = 0.0) -> bool:
    """Whether steps of one kind cost something else now. ``wander`` is the relative variance of a poll's mean beyond
    the noise of its steps: where neighbours come and go, a slow poll is no change."""
    if min(before.count, fresh.count) < LEAST_STEPS:
        return False
    gap = abs(before.mean_seconds - fresh.mean_seconds)
    noise = before.variance / before.count + fresh.variance / fresh.count
    error = math.sqrt(noise + wander * before.mean_seconds**2)
    return gap > SURPRISE * error and gap > LEAST_STEP_SHIFT * before.mean_seconds
