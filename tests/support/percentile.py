"""Percentile of measured values, as all suites count it."""

from __future__ import annotations

import math
from collections.abc import Iterable


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
