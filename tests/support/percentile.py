"""Percentile of measured values, as all suites count it."""

from __future__ import annotations

from collections.abc import Iterable


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the smallest value that more than ``percent`` of the values do not exceed, at most the greatest one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
