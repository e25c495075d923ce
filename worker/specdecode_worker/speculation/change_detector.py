"""Detection of a change in the tokens per step at one load, by cumulative sums (CUSUM).

A cumulative sum adds how far each window lies from the mean of earlier ones, in standard deviations, less a slack
(E. S. Page, Continuous inspection schemes, 1954). It reacts to a lasting shift, and not to one unusual window.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

WINDOW_STEPS = 128
"""Fewest steps of a window. A request spans several windows, so windows differ as requests do."""
MIN_WINDOWS = 8
"""Number of windows before the first comparison."""
MEMORY_WINDOWS = 64
"""Number of windows that the mean and the deviation remember."""
SLACK, THRESHOLD, LARGEST = 1.0, 12.0, 4.0
"""In standard deviations: the difference without effect, the sum that is a change, and the most that one window counts
for. A large shift is detected after four windows.
"""
LEAST_DEVIATION = 0.01
"""Smallest standard deviation, as a share of the mean."""


@dataclass(slots=True)
class ChangeDetector:
    """Detector for the steps of one load that run its planned shapes."""

    _windows: int = 0
    _mean: float = 0.0
    _variance: float = 0.0
    _above: float = 0.0
    _below: float = 0.0
    _steps: int = 0
    _tokens: float = 0.0

    def add(self, tokens: float, steps: int) -> bool:
        """Add steps with the sum of their tokens per sequence, and return whether tokens per step have changed."""
        self._steps, self._tokens = self._steps + steps, self._tokens + tokens
        if self._steps < WINDOW_STEPS:
            return False
        value, self._steps, self._tokens = self._tokens / self._steps, 0, 0.0
        self._compare(value)
        # A window that may belong to a change would hide it: it would widen the deviation.
        if max(self._above, self._below) < LARGEST - SLACK:
            self._remember(value)
        return max(self._above, self._below) >= THRESHOLD

    def _compare(self, value: float) -> None:
        """Add the distance of a window to the cumulative sums."""
        if self._windows < MIN_WINDOWS:
            return
        deviation = max(sqrt(self._variance * (1 + 1 / self._windows)), LEAST_DEVIATION * self._mean)
        score = min(max((value - self._mean) / deviation, -LARGEST), LARGEST) if deviation else 0.0
        self._above = max(0.0, self._above + score - SLACK)
        self._below = max(0.0, self._below - score - SLACK)

    def _remember(self, value: float) -> None:
        """Add a window to the mean and the variance."""
        self._windows = min(self._windows + 1, MEMORY_WINDOWS)
        distance = value - self._mean
        self._mean += distance / self._windows
        self._variance += (distance * (value - self._mean) - self._variance) / self._windows
