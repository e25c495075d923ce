"""Admission control: limit of running and waiting generations, shares of clients, and Retry-After of a full queue."""

from __future__ import annotations

import math
from collections import Counter, deque

from specdecode_worker.server.errors import BadRequest, TooManyWaiting

# Number of recent completions from which the completion rate is estimated.
_RECENT_COMPLETIONS = 64
# Upper bound of Retry-After.
_MAX_RETRY_AFTER_SECONDS = 60
# The first half of the places is for any client. In the other half a client keeps to its equal share, so that a client
# that floods the queue always leaves places to the others.
_UNSHARED_PART = 2
# Time since the last request after which a client without places counts as absent: longer than the pauses of a user
# between requests, so that its share is free when it returns.
_ACTIVE_SECONDS = 300.0


class AdmissionQueue:
    """Bounded queue of ``max_num_seqs`` running and ``max_waiting`` waiting generations.

    The caller passes the time, in seconds of one monotonic clock.
    """

    def __init__(self, max_num_seqs: int, max_waiting: int) -> None:
        self._capacity = max_num_seqs + max_waiting
        self._max_waiting = max_waiting
        self._completion_times: deque[float] = deque(maxlen=_RECENT_COMPLETIONS)
        self._places: Counter[str] = Counter()
        self._last_seen: dict[str, float] = {}

    @property
    def places(self) -> dict[str, int]:
        """Running and waiting generations of each client."""
        return dict(self._places)

    def record_start(self, client: str) -> None:
        """Record that a generation of ``client`` takes a place."""
        self._places[client] += 1

    def record_end(self, now: float, client: str = "") -> None:
        """Record that a generation of ``client`` ended at time ``now``, for whatever reason."""
        self._completion_times.append(now)
        self._places[client] -= 1
        if self._places[client] <= 0:
            del self._places[client]

    def check(self, in_flight: int, more: int, now: float, field: str, client: str = "") -> None:
        """Check that the queue has a place for ``more`` generations; ``in_flight`` is the current number.

        Once half of the places are taken, a client may hold at most its equal share of all places. This does not apply
        to a client that holds none, or if no other client is active.

        Raises:
            BadRequest: ``more`` exceeds the size of the queue; the error names ``field``.
            TooManyWaiting: The queue has no place for them now; the error has the Retry-After time.
        """
        self._last_seen[client] = now
        if more > self._capacity:
            raise BadRequest(f"a request may ask for at most {self._capacity} choices in total", param=field)
        if in_flight + more > self._capacity:
            raise TooManyWaiting(
                f"{self._max_waiting} requests are waiting already; try again later",
                retry_after_seconds=self.wait_seconds(in_flight + more - self._capacity, now),
            )

        share = self._capacity // self._count_active(now)
        held = self._places.get(client, 0)
        if in_flight + more > self._capacity // _UNSHARED_PART and held and held + more > share < self._capacity:
            raise TooManyWaiting(
                f"{held} requests of this API key are running or waiting already, and other keys are active; "
                "try again later",
                retry_after_seconds=self.wait_seconds(max(held + more - share, 1), now),
            )

    def _count_active(self, now: float) -> int:
        """Return the number of clients that hold places or were seen recently, and forget the others."""
        absent = [
            client
            for client, seen in self._last_seen.items()
            if client not in self._places and now - seen > _ACTIVE_SECONDS
        ]
        for client in absent:
            del self._last_seen[client]
        return len(self._last_seen)

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
