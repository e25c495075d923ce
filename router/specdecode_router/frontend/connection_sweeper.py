"""Bound of the connections: those without a request are closed after a time, or when there are too many.

A connection has a request until its handler is done. aiohttp writes the answers of probes and errors only then, so that
a connection without a request may have unread output.
"""

from __future__ import annotations

import asyncio
import logging
import time

from aiohttp import web

from specdecode_router.frontend.error_responses import Handler
from specdecode_router.settings import RouterSettings

SWEEP_SECONDS = 0.5

log = logging.getLogger(__name__)


class ConnectionSweeper:
    """Connections without a request: new ones, and those that wait for the next one.

    The time for a first request is bounded here, and that for a later one by aiohttp itself.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
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
        """Close connections that are late with their header or do not read, and the oldest idle ones of too many."""
        # One without a transport is being closed. A dict keeps the order in which they were accepted.
        connections = {one: one.transport for one in server.connections if one.transport is not None}
        self._served.intersection_update(connections)
        self._idle = {one: since for one, since in self._idle.items() if one in connections}
        for one in connections:
            if one not in self._serving:
                self._idle.setdefault(one, now)
        limit = self._settings.max_connections
        surplus = len(connections) - limit
        if surplus > 0:
            log.warning("%d connections are more than the limit of %d", len(connections), limit)
        for count, (one, since) in enumerate(list(self._idle.items())):
            unsent, seconds = connections[one].get_write_buffer_size(), now - since
            is_late = one not in self._served and seconds > self._settings.header_timeout_seconds
            if count < surplus or is_late or (unsent and seconds > self._settings.write_timeout_seconds):
                one.force_close()
                connections[one].abort()  # else it stays open until its client has read the rest, or ends TLS
                del self._idle[one]
