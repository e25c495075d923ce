"""Search for attempts whose worker is silent: one sweep over all attempts instead of a timer for each frame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SWEEP_SECONDS = 0.05
_LATE_FACTOR = 4
"""A sweep that is late by this many intervals finds a process that was busy itself: frames wait unread."""


class SilenceMonitor:
    """All running requests, checked twenty times a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._checks: set[Callable[[float], None]] = set()

    def add(self, check: Callable[[float], None]) -> None:
        """Check a request from now on. ``check`` looks for attempts whose worker is silent."""
        self._checks.add(check)

    def remove(self, check: Callable[[float], None]) -> None:
        """Check a request no longer."""
        self._checks.discard(check)

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
        for check in tuple(self._checks):
            check(now)
