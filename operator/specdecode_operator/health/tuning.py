"""Thresholds for outliers among the workers, with unit and reason."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Policy constants of worker health."""

    # Acceptance of the first drafted token.
    recent_half_life_drafts: float = 100.0
    """Half-life of a worker's recent acceptance, in drafts; a collapse shows within one or two polls."""
    past_half_life_drafts: float = 5000.0
    """Half-life of a worker's past acceptance, in drafts; much longer than it takes to detect a collapse."""
    request_half_life: float = 50.0
    """Half-life of the request sums that give the variance between requests, in requests."""
    min_past_drafts: float = 200.0
    """Drafts before a worker's past is used as its expectation; the standard error is then below 0.04."""
    min_recent_drafts: float = 30.0
    """Drafts before a worker's recent acceptance is compared; fewer drafts rarely reach ``outlier_errors``."""
    collapsed_ratio: float = 0.5
    """Ratio to the expectation below which acceptance has collapsed; tasks differ less (0.45 to 0.88 in the guides)."""
    recovered_ratio: float = 0.75
    """Ratio to the expectation above which a worker has recovered; well above ``collapsed_ratio``, as hysteresis."""
    common_ratio: float = 0.7
    """Ratio to the peers above which a fall is common to all workers, so the traffic or the draft is its cause."""
    outlier_errors: float = 4.0
    """Standard errors below the expectation that make an outlier; workers are compared every few seconds for months."""
    freeze_errors: float = 2.0
    """Standard errors below the expectation at which the past is frozen, so that a collapse does not lower it."""
    outlier_polls: int = 2
    """Consecutive polls with an outlier before it counts as a collapse; one poll may be an odd batch of requests."""
    min_peers: int = 2
    """Peers needed to judge a worker without a past."""

    # Step time.
    slow_ratio: float = 1.5
    """Ratio of step times to the median peer above which a worker is slow; below it devices just differ."""
    slow_seconds: float = 60.0
    """Seconds that a worker must be slow before it is reported; neighbours may be noisy for a while."""
    step_time_half_life_seconds: float = 20.0
    """Half-life of a worker's relative step time, in seconds; about four polls."""
    max_log_step_time: float = math.log(8)
    """Bound on the logarithm of the correction of step times; devices of one deployment differ less."""

    # State and replacement.
    forget_seconds: float = 900.0
    """Seconds after which the state of an absent pod is dropped; a pod does not come back later."""
    replace_after_seconds: float = 60.0
    """Seconds that a collapse must last without speculation before the worker is replaced; some recover."""
    replace_interval_seconds: float = 600.0
    """Seconds between two replacements of serving workers; if new pods collapse too, pods are not the cause."""


TUNING = Tuning()
