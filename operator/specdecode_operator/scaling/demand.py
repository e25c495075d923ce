"""Arrivals and arrival rates from the report differences of the last minute."""

from __future__ import annotations

import math
from collections.abc import Iterable

from specdecode_operator.telemetry.deltas import Delta


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
