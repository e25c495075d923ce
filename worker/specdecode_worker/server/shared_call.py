"""Shared call: callers at the same time wait for one computation, and computations have a minimum interval."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")

SHARE_SECONDS = 0.25
"""Minimum time from the start of one computation to the start of the next.

A client that polls once a second never waits for it. Clients in a tight loop cause four reports a second, together.
"""


class SharedCall(Generic[Result]):
    """Call whose result is shared by all callers that arrive before it starts.

    The result is always computed after the caller arrived, so no caller gets an old one. The price is that a caller may
    wait up to the interval.
    """

    def __init__(self, call: Callable[[], Awaitable[Result]], interval_seconds: float = SHARE_SECONDS) -> None:
        self._call = call
        self._interval_seconds = interval_seconds
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[Result] | None = None
        self._began = -interval_seconds

    async def result(self) -> Result:
        """Return the result of the next computation, or raise its error."""
        if self._next is None:
            self._next = asyncio.create_task(self._run())
            # A task whose callers are all gone has nobody to report its error to.
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._next)

    async def _run(self) -> Result:
        async with self._one_at_a_time:
            await asyncio.sleep(self._began + self._interval_seconds - time.monotonic())
            self._began = time.monotonic()
            self._next = None
            return await self._call()
