"""From the last minute's polls to arrivals: what came in lately, and over the window."""

from __future__ import annotations

from collections.abc import Iterable

from specdecode_operator.measurements import Delta

RECENT_SECONDS = 15.0
"""Three polls: fewer arrivals than come in so long say little, and more would answer late."""


def arrival_rate(window: Iterable[Delta], *, now: float, within: float) -> float:
    """Arrivals a second over the polls of the last ``within`` seconds; 0 when there were none."""
    recent = [delta for delta in window if delta.at > now - within]
    seconds = sum(delta.seconds for delta in recent)
    return arrivals(recent) / seconds if seconds > 0 else 0.0


def arrivals(window: Iterable[Delta]) -> float:
    return sum(max(0.0, sums.arrivals) for delta in window for sums in delta.traffic.values())
