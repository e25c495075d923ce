"""Plain step time as a function of the number of sequences, as measured at start.

A bucket of the plan covers several numbers of sequences, and drafts change their distribution, because requests end at
different times. Without a correction, drafts would appear faster than they are. Step times are therefore scaled to the
upper edge of the bucket before they are compared.
"""

from __future__ import annotations

from bisect import bisect_left


class PlainStepTimes:
    """Piecewise linear step time by number of sequences, extrapolated beyond the measured points.

    With fewer than two points the curve is constant.
    """

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []

    def learn(self, sequences: int, seconds: float) -> None:
        """Set the step time in seconds for this number of sequences."""
        others = [point for point in self._points if point[0] != sequences]
        self._points = sorted([*others, (sequences, seconds)])

    def scaled(self, seconds: float, sequences: float, edge: int) -> float:
        """Scale the ``seconds`` of a step of ``sequences`` to a step of ``edge`` sequences.

        ``sequences`` may be the mean of several steps.
        """
        before, after = self._at(sequences), self._at(edge)
        return seconds * after / before if before > 0 and after > 0 else seconds

    def _at(self, sequences: float) -> float:
        points = self._points
        if len(points) < 2:
            return 1.0
        right = min(max(bisect_left(points, (sequences, 0.0)), 1), len(points) - 1)
        (low, least), (high, most) = points[right - 1 : right + 1]
        return least + (most - least) * (sequences - low) / (high - low)
