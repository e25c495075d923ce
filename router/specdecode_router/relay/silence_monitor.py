"""Search for attempts whose worker is silent: one sweep over all attempts instead of a timer for each frame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

SWEEP_SECONDS = 0.05
_LATE_FACTOR = 4
"""A sweep that is late by this many intervals finds a process that was busy itself: frames wait unread."""


class Watched(Protocol):
    """Request that can check its attempts."""

    def check_silence(self, now: float) -> None:
        """Look for attempts whose worker is silent."""


class SilenceMonitor:
    """All running requests, checked twenty times a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._watched: set[Watched] = set()

    def add(self, request: Watched) -> None:
        """Check a request from now on."""
        self._watched.add(request)

    def remove(self, request: Watched) -> None:
        """Check a request no longer."""
        self._watched.discard(request)

    async def run(self) -> None:
        """Sweep until cancelled."""
        last = self._clock()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = self._clock()
            late, last = now - last > _LATE_FACTOR * SWEEP_SECONDS, now
            if not late:
                self.sweep(now)

    def sweep(self, now: float) -> None:
        """Check all requests."""
        for request in tuple(self._watched):
            request.check_silence(now)
