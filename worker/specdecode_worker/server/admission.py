"""Admission control: limit of running and waiting generations, and the Retry-After time of a full queue."""

from __future__ import annotations

import math
from collections import deque

from specdecode_worker.server.errors import BadRequest, TooManyWaiting

# Number of recent completions from which the completion rate is estimated.
_RECENT_COMPLETIONS = 64
# Upper bound of Retry-After.
_MAX_RETRY_AFTER_SECONDS = 60


class AdmissionQueue:
    """Bounded queue of ``max_num_seqs`` running and ``max_waiting`` waiting generations.

    The caller passes the time, in seconds of one monotonic clock.
    """

    def __init__(self, max_num_seqs: int, max_waiting: int) -> None:
        self._capacity = max_num_seqs + max_waiting
        self._max_waiting = max_waiting
        self._completion_times: deque[float] = deque(maxlen=_RECENT_COMPLETIONS)

    def record_end(self, now: float) -> None:
        """Record that a generation ended at time ``now``, for whatever reason."""
        self._completion_times.append(now)

    def check(self, in_flight: int, more: int, now: float, field: str) -> None:
        """Check that the queue has a place for ``more`` generations; ``in_flight`` is the current number.

        Raises:
            BadRequest: ``more`` exceeds the size of the queue; the error names ``field``.
            TooManyWaiting: The queue has no place for them now; the error has the Retry-After time.
        """
        if more > self._capacity:
            raise BadRequest(f"a request may ask for at most {self._capacity} choices in total", param=field)
        if in_flight + more > self._capacity:
            raise TooManyWaiting(
                f"{self._max_waiting} requests are waiting already; try again later",
                retry_after_seconds=self.wait_seconds(in_flight + more - self._capacity, now),
            )

    def wait_seconds(self, leaving: int, now: float) -> int:
        """Estimate the seconds until ``leaving`` generations have ended, at the rate of the recent completions.

        Returns:
            A value from 1 to 60; 1 with fewer than two recorded completions.
        """
        if len(self._completion_times) < 2:
            return 1
        # Measure until now and not until the last completion, so that a stalled queue gives a longer time.
        seconds_each = (now - self._completion_times[0]) / len(self._completion_times)
        return min(max(math.ceil(leaving * seconds_each), 1), _MAX_RETRY_AFTER_SECONDS)
