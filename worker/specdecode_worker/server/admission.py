"""Admission control: limit of running and waiting generations, and the Retry-After time of a full queue."""

from __future__ import annotations

import math
from collections import deque

from specdecode_worker.server.errors import BadRequest, TooManyWaiting

# Number of recent completions from which the completion rate is estimated.
_REMEMBERED = 64
# Upper bound of Retry-After.
_LONGEST_SECONDS = 60


class Line:
    """Bounded queue of ``max_num_seqs`` running and ``max_waiting`` waiting generations.

    The caller passes the time, in seconds of one monotonic clock.
    """

    def __init__(self, max_num_seqs: int, max_waiting: int) -> None:
        self._room = max_num_seqs + max_waiting
        self._max_waiting = max_waiting
        self._ended: deque[float] = deque(maxlen=_REMEMBERED)

    def ended(self, now: float) -> None:
        """Record that a generation ended at time ``now``, for whatever reason."""
        self._ended.append(now)

    def check(self, there: int, more: int, now: float, field: str) -> None:
        """Check that the queue has a place for ``more`` generations; ``there`` is the number now running or waiting.

        Raises:
            BadRequest: ``more`` exceeds the size of the queue; the error names ``field``.
            TooManyWaiting: The queue has no place for them now; the error has the Retry-After time.
        """
        if more > self._room:
            raise BadRequest(f"at most {self._room} answers may come of one request", param=field)
        if there + more > self._room:
            raise TooManyWaiting(
                f"{self._max_waiting} requests are waiting already; try again later",
                retry_after_seconds=self.wait_seconds(there + more - self._room, now),
            )

    def wait_seconds(self, leaving: int, now: float) -> int:
        """Estimate the seconds until ``leaving`` generations have ended, at the rate of the recent completions.

        Returns:
            A value from 1 to 60; 1 with fewer than two recorded completions.
        """
        if len(self._ended) < 2:
            return 1
        # Measure until now and not until the last completion, so that a stalled queue gives a longer time.
        seconds_each = (now - self._ended[0]) / len(self._ended)
        return min(max(math.ceil(leaving * seconds_each), 1), _LONGEST_SECONDS)
