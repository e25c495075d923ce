"""The waiting line: how many requests may be there at once, and when to come back once it is full."""

from __future__ import annotations

import math
from collections import deque

from specdecode_worker.server.errors import BadRequest, TooManyWaiting

_REMEMBERED = 64
_LONGEST_SECONDS = 60


class Line:
    """``room`` requests at once, running ones included. Time is passed in, in seconds of one clock."""

    def __init__(self, max_num_seqs: int, max_waiting: int) -> None:
        self._room = max_num_seqs + max_waiting
        self._max_waiting = max_waiting
        self._ended: deque[float] = deque(maxlen=_REMEMBERED)

    def ended(self, now: float) -> None:
        """A request left, whatever its end."""
        self._ended.append(now)

    def check(self, there: int, more: int, now: float, field: str) -> None:
        """Raises TooManyWaiting, or BadRequest that names ``field`` for more answers than may ever wait."""
        if more > self._room:
            raise BadRequest(f"at most {self._room} answers may come of one request", param=field)
        if there + more > self._room:
            raise TooManyWaiting(
                f"{self._max_waiting} requests are waiting already; try again later",
                retry_after_seconds=self.wait_seconds(there + more - self._room, now),
            )

    def wait_seconds(self, leaving: int, now: float) -> int:
        """Until about so many have left, at the pace of the last ones; 1 as long as none is known."""
        if len(self._ended) < 2:
            return 1
        # Until now, not until the last one left: a line that has come to a stop is slow.
        seconds_each = (now - self._ended[0]) / len(self._ended)
        return min(max(math.ceil(leaving * seconds_each), 1), _LONGEST_SECONDS)
