"""Limit of open calls that deployments share fairly."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from specdecode_operator.types import Key


class CallSlots:
    """Slots for calls, limited in total and per deployment.

    A free slot goes to the waiting deployment that holds the fewest, so that deployments with hanging workers cannot
    make another one wait for longer than the next call takes to end.
    """

    def __init__(self, *, total: int, per_deployment: int) -> None:
        self._free = total
        self._per_deployment = per_deployment
        self._held: dict[Key, int] = {}
        self._waiting: dict[Key, deque[asyncio.Future[None]]] = {}
        """By deployment, the one that has waited longest first. No deque is empty."""

    def held(self, key: Key) -> int:
        """Return the number of open calls of a deployment."""
        return self._held.get(key, 0)

    @asynccontextmanager
    async def slot(self, key: Key) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        await self.acquire(key)
        try:
            yield
        finally:
            self.release(key)

    async def acquire(self, key: Key) -> None:
        """Wait for a slot. The caller releases it."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(waiter)
        self._grant()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                # The slot was granted in the same turn of the event loop as the cancellation.
                self.release(key)
            else:
                self._forget(key, waiter)
            raise

    def release(self, key: Key) -> None:
        """Return a slot, for the next call that waits."""
        self._free += 1
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
        self._grant()

    def _grant(self) -> None:
        """Give free slots to waiting calls."""
        while self._free and (key := self._next()) is not None:
            waiter = self._waiting[key][0]
            self._forget(key, waiter)
            if not waiter.done():
                self._free -= 1
                self._held[key] = self.held(key) + 1
                waiter.set_result(None)

    def _next(self) -> Key | None:
        """Return the waiting deployment that holds the fewest slots; None if all that wait have as many as allowed."""
        best, fewest = None, self._per_deployment
        for key in self._waiting:
            if self.held(key) < fewest:
                best, fewest = key, self.held(key)
            if not fewest:
                break
        return best

    def _forget(self, key: Key, waiter: asyncio.Future[None]) -> None:
        waiters = self._waiting.get(key)
        if waiters is not None and waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[key]
