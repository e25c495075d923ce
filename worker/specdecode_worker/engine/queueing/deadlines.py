"""Deadlines of requests, ordered by time, so that a step checks only the earliest one."""

from __future__ import annotations

import heapq
from collections.abc import Container
from typing import Literal

from specdecode_worker.engine.ipc.messages import Submit

Reason = Literal["deadline", "queue_timeout"]

_REBUILD_ENTRIES = 1024
"""Size from which entries of ended requests are removed. Below it they cost less than the removal."""


class Deadlines:
    """Deadlines of all requests of an engine. The caller passes the time, in seconds of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self.next_seconds = float("inf")
        """Time of the earliest deadline."""
        self._heap: list[tuple[float, str, Reason]] = []
        self._rebuild_at = _REBUILD_ENTRIES

    def add(self, submit: Submit, alive: Container[str]) -> None:
        """Add the deadlines of a new request. ``alive`` has the ids of all requests that have not ended."""
        if len(self._heap) >= self._rebuild_at:
            self._heap = [entry for entry in self._heap if entry[1] in alive]
            heapq.heapify(self._heap)
            self._rebuild_at = max(2 * len(self._heap), _REBUILD_ENTRIES)
        if submit.deadline_seconds:
            heapq.heappush(self._heap, (submit.deadline_seconds, submit.request_id, "deadline"))
        if submit.queue_deadline_seconds:
            heapq.heappush(self._heap, (submit.queue_deadline_seconds, submit.request_id, "queue_timeout"))
        self._update_next()

    def pop_expired(self, now: float) -> list[tuple[str, Reason]]:
        """Remove and return the requests whose deadline has passed, earliest first. Some may have ended already."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            _, request_id, reason = heapq.heappop(self._heap)
            expired.append((request_id, reason))
        self._update_next()
        return expired

    def _update_next(self) -> None:
        self.next_seconds = self._heap[0][0] if self._heap else float("inf")
