"""Bound of the connections: those without a request are closed after a time, or when there are too many."""

from __future__ import annotations

import asyncio
import logging
import time

from aiohttp import web

from specdecode_router.frontend.error_responses import Handler

SWEEP_SECONDS = 0.5

log = logging.getLogger(__name__)


class ConnectionSweeper:
    """Connections that have not sent a whole request header yet. aiohttp itself bounds those that are idle later."""

    def __init__(self, header_seconds: float, max_connections: int) -> None:
        self._header_seconds, self._max_connections = header_seconds, max_connections
        self._new: dict[web.RequestHandler, float] = {}
        """Connections without a request, by the time at which they were first seen; the oldest come first."""
        self._served: set[web.RequestHandler] = set()
        """Connections that had a request."""

    @web.middleware
    async def note_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Record that the connection of a request has sent its header."""
        self._served.add(request.protocol)
        return await handler(request)

    async def run(self, server: web.Server) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep(server, time.monotonic())

    def sweep(self, server: web.Server, now: float) -> None:
        """Close connections that are late with their header, and the oldest of too many without a request."""
        connections = set(server.connections)
        self._served &= connections
        waiting = connections - self._served
        self._new = {one: since for one, since in self._new.items() if one in waiting}
        for one in waiting:
            self._new.setdefault(one, now)
        surplus = len(connections) - self._max_connections
        if surplus > 0:
            log.warning("%d connections are more than the limit of %d", len(connections), self._max_connections)
        for count, (one, since) in enumerate(list(self._new.items())):
            if count < surplus or now - since > self._header_seconds:
                one.force_close()
                del self._new[one]
