"""Life cycle of the router: ready, not ready but serving, refusing, and the requests that still run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from enum import IntEnum

from specdecode_router.errors import ApiError


class State(IntEnum):
    """State of the process."""

    SERVING = 0
    LEAVING = 1
    """Not ready, so that the Service removes this router; requests that still come are served."""
    REFUSING = 2
    """New requests are refused; running ones finish."""


class Lifecycle:
    """State of the process and number of running requests."""

    def __init__(self) -> None:
        self.state = State.SERVING
        self.running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """True until the shutdown begins."""
        return self.state is State.SERVING

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while the block runs. Raises ApiError while requests are refused."""
        if self.state is State.REFUSING:
            raise ApiError(503, "this router is shutting down", code="draining", headers={"Retry-After": "1"})
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def shut_down(self, delay_seconds: float, grace_seconds: float) -> int:
        """Leave: not ready at once, refuse new requests after ``delay_seconds``, wait for the running ones.

        Returns:
            Number of requests that are still running ``grace_seconds`` after the delay.
        """
        self.state = State.LEAVING
        await asyncio.sleep(delay_seconds)
        self.state = State.REFUSING
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self._idle.wait()
        return self.running
