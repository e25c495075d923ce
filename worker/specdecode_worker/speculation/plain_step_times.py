"""What a plain step takes by number of sequences, as timed before anybody was served.

A bucket of the plan holds several numbers of sequences, and drafts change which of them run: requests end apart. Times
are compared as if all steps had run with the bucket's edge, or drafts would look faster than they are.
"""

from __future__ import annotations

from bisect import bisect_left


class PlainCurve:
    """Affine between the loads that were timed and beyond them; flat while there are fewer than two."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []

    def learn(self, sequences: int, seconds: float) -> None:
        others = [point for point in self._points if point[0] != sequences]
        self._points = sorted([*others, (sequences, seconds)])

    def scaled(self, seconds: float, sequences: int, edge: int) -> float:
        """What a step of ``sequences`` that took ``seconds`` would take with ``edge`` of them."""
        before, after = self._at(sequences), self._at(edge)
        return seconds * after / before if before > 0 and after > 0 else seconds

    def _at(self, sequences: int) -> float:
        points = self._points
        if len(points) < 2:
            return 1.0
        right = min(max(bisect_left(points, (sequences, 0.0)), 1), len(points) - 1)
        (low, least), (high, most) = points[right - 1 : right + 1]
        return least + (most - least) * (sequences - low) / (high - low)
