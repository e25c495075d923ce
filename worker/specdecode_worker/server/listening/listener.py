"""HTTP listeners of the public and the admin port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial

import uvicorn
from fastapi import FastAPI

from specdecode_worker.contract import ServerConfig
from specdecode_worker.http_edge.tls import TlsCertificate
from specdecode_worker.server.listening.connection_state import KEEP_ALIVE_SECONDS, TimeLimits
from specdecode_worker.server.listening.connection_table import SWEEP_SECONDS, ConnectionTable
from specdecode_worker.server.listening.http_protocol import BoundedHttpProtocol
from specdecode_worker.server.liveness.vital_parts import VitalParts

# Time for open connections to read the data already written, after the last request has ended.
_FLUSH_SECONDS = 2
# The operator, a router and the kubelet need a few connections each.
_MAX_ADMIN_CONNECTIONS = 256
# File descriptors for everything but connections: models, libraries, sockets of the engine, capture.
_OTHER_FILES = 256
# Bytes of unread output that the kernel holds for each connection; without it the kernel grows its buffer to megabytes.
_SEND_BUFFER_BYTES = 128 * 1024
_TLS_CHECK_SECONDS = 2.0
# Time for a client to answer the end of TLS before its connection is dropped.
_TLS_CLOSE_SECONDS = 1.0
# uvicorn calls `on_tick` ten times a second.
_TICKS_PER_SECOND = 10

log = logging.getLogger(__name__)


class Listener(uvicorn.Server):
    """uvicorn server of one port, with bounded connections.

    It has no signal handlers of its own, because `serve` controls the shutdown of the process.
    """

    def __init__(self, app: FastAPI, table: ConnectionTable, header_seconds: float, tls: TlsCertificate | None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttpProtocol,
                ws="none",
                access_log=False,
                log_config=None,
                log_level="warning",
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_FLUSH_SECONDS,
            )
        )
        self._table, self._header_seconds, self._tls = table, header_seconds, tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on ``sockets``."""
        protocol = partial(BoundedHttpProtocol, self._table, self.config, self.server_state, {})
        # The table sees a connection only after its handshake, so the handshake has the time-out of headers.
        handshake_seconds, close_seconds = (
            (None, None) if self._tls is None else (self._header_seconds, _TLS_CLOSE_SECONDS)
        )
        self.servers = [
            await asyncio.get_running_loop().create_server(
                protocol,
                sock=one,
                backlog=self.config.backlog,
                ssl=None if self._tls is None else self._tls.context,
                ssl_handshake_timeout=handshake_seconds,
                ssl_shutdown_timeout=close_seconds,
            )
            for one in sockets or ()
        ]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Close overdue connections, and read a changed certificate."""
        if counter % round(SWEEP_SECONDS * _TICKS_PER_SECOND) == 0:
            self._table.sweep(time.monotonic())
        if self._tls is not None and counter % round(_TLS_CHECK_SECONDS * _TICKS_PER_SECOND) == 0:
            self._tls.refresh()
        return await super().on_tick(counter)


@contextlib.asynccontextmanager
async def listening(
    apps: tuple[FastAPI, FastAPI],
    sockets: Sequence[socket.socket],
    config: ServerConfig,
    tls: TlsCertificate | None,
    parts: VitalParts,
) -> AsyncIterator[None]:
    """Serve the public and the admin application on their sockets; a failure of a listener is one of ``parts``.

    On exit, open connections get some time to read the data already written.
    """
    limits = TimeLimits.from_config(config)
    tables = (
        ConnectionTable("public", limits, _affordable_connections(config.max_connections)),
        ConnectionTable("admin", limits, _MAX_ADMIN_CONNECTIONS),
    )
    listeners = [Listener(app, table, limits.header_seconds, tls) for app, table in zip(apps, tables, strict=True)]
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # accepted sockets inherit it
    serving = [
        asyncio.create_task(listener.serve(sockets=[one])) for listener, one in zip(listeners, sockets, strict=True)
    ]
    for name, task in zip(("public listener", "admin listener"), serving, strict=True):
        parts.watch(name, task)
    try:
        yield
    finally:
        for listener in listeners:
            listener.should_exit = True
        await asyncio.gather(*serving, return_exceptions=True)


def _affordable_connections(max_connections: int) -> int:
    """Raise the limit of open files for ``max_connections``, and return how many connections the limit allows."""
    needed = max_connections + _MAX_ADMIN_CONNECTIONS + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    affordable = max(soft - (needed - max_connections), 1)
    log.warning("at most %d connections, because the limit of open files is %d (ulimit -n)", affordable, hard)
    return affordable
