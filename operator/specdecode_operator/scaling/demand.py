"""From the last minute's polls to arrivals: what came in lately, and over the window."""

from __future__ import annotations

import math
from collections.abc import Iterable

from specdecode_operator.telemetry.deltas import Delta

RECENT_SECONDS = 15.0
"""Three polls: fewer arrivals than come in so long say little, and more would answer late."""


def arrival_rate(window: Iterable[Delta], *, now: float, within: float, doubt: float = 0) -> float:
    """Arrivals a second over the polls of the last ``within`` seconds; 0 when there were none. With ``doubt`` a lower
    bound, so many standard errors below: arrivals are taken to be Poisson's, so n of them are sure to a root of n."""
    recent = [delta for delta in window if delta.at > now - within]
    seconds, count = sum(delta.seconds for delta in recent), arrivals(recent)
    return max(0.0, count - doubt * math.sqrt(count)) / seconds if seconds > 0 else 0.0


def arrivals(window: Iterable[Delta]) -> float:
    return sum(max(0.0, sums.arrivals) for delta in window for sums in delta.traffic.values())
