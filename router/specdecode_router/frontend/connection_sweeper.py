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
    """Connections without a request: new ones, and those that wait for the next one.

    The time for a first request is bounded here, and that for a later one by aiohttp itself.
    """

    def __init__(self, header_seconds: float, max_connections: int) -> None:
        self._header_seconds, self._max_connections = header_seconds, max_connections
        self._idle: dict[web.RequestHandler, float] = {}
        """Connections without a request, by the time at which they were first seen so; the oldest come first."""
        self._serving: set[web.RequestHandler] = set()
        self._served: set[web.RequestHandler] = set()
        """Connections that have or had a request."""

    @web.middleware
    async def note_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Record that the connection of a request has sent its header, and serves it."""
        connection = request.protocol
        self._idle.pop(connection, None)
        self._served.add(connection)
        self._serving.add(connection)
        try:
            return await handler(request)
        finally:
            self._serving.discard(connection)

    async def run(self, server: web.Server) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep(server, time.monotonic())

    def sweep(self, server: web.Server, now: float) -> None:
        """Close connections that are late with their header, and the oldest of too many without a request."""
        # One without a transport is being closed. A dict keeps the order in which they were accepted.
        connections = dict.fromkeys(one for one in server.connections if one.transport is not None)
        self._served.intersection_update(connections)
        self._idle = {one: since for one, since in self._idle.items() if one in connections}
        for one in connections:
            if one not in self._serving:
                self._idle.setdefault(one, now)
        surplus = len(connections) - self._max_connections
        if surplus > 0:
            log.warning("%d connections are more than the limit of %d", len(connections), self._max_connections)
        for count, (one, since) in enumerate(list(self._idle.items())):
            is_late = one not in self._served and now - since > self._header_seconds
            if count < surplus or is_late:
                one.force_close()
                del self._idle[one]
