"""Port of the router: its socket, its certificate, and the server on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator

from aiohttp import web, web_protocol

from specdecode_router.errors import CannotStart
from specdecode_router.frontend.application import build_application
from specdecode_router.frontend.connection_sweeper import ConnectionSweeper
from specdecode_router.frontend.state import RouterState
from specdecode_router.settings import RouterSettings
from specdecode_worker.http_edge import TlsCertificate, listen

log = logging.getLogger(__name__)

_SEND_BUFFER_BYTES = 128 * 1024
"""Bytes of unread output that the kernel holds for each connection; without it its buffer grows to megabytes."""
_READ_BYTES = 16 * 1024
"""Half of the bytes of a body that wait unread in this process before its connection is paused."""
_BACKLOG = 2048
_OTHER_FILES = 256
_TLS_CLOSE_SECONDS = 1.0
"""Time for a client to answer the end of TLS before its connection is dropped, as at a worker."""
# Requests of a connection that wait for the answer to the one before them. They count in no budget, and each may have a
# megabyte of headers. aiohttp has no parameter for this number; its own is 32.
web_protocol.MAX_MSG_QUEUE_SIZE = 2


def end_process_on_error(task: asyncio.Task[None]) -> None:
    """Log the error of a task and end the process. Without one of its loops the router would decide by old data."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("a part of the router has failed", exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)


@contextlib.asynccontextmanager
async def listening(
    state: RouterState, listener: socket.socket, certificate: TlsCertificate | None
) -> AsyncIterator[None]:
    """Serve clients during the block."""
    settings = state.settings
    sweeper = ConnectionSweeper(settings)
    runner = web.AppRunner(
        build_application(state, sweeper),
        handle_signals=False,
        access_log=None,
        handler_cancellation=True,
        auto_decompress=False,
        keepalive_timeout=75,
        read_bufsize=_READ_BYTES,
        shutdown_timeout=2,
    )
    await runner.setup()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # accepted sockets inherit it
    assert runner.server is not None
    context = None if certificate is None else certificate.context
    # Without a limit of its own a handshake may take a minute, and its connection is not among those of the server. The
    # end of TLS has one too, because clients need not answer it.
    handshake_seconds, close_seconds = (
        (None, None) if context is None else (settings.header_timeout_seconds, _TLS_CLOSE_SECONDS)
    )
    server = await asyncio.get_running_loop().create_server(
        runner.server,
        sock=listener,
        backlog=_BACKLOG,
        ssl=context,
        ssl_handshake_timeout=handshake_seconds,
        ssl_shutdown_timeout=close_seconds,
    )
    sweeps = asyncio.create_task(sweeper.run(runner.server))
    sweeps.add_done_callback(end_process_on_error)
    try:
        yield
    finally:
        server.close()
        sweeps.cancel()
        await runner.cleanup()


def raise_file_limit(max_connections: int) -> None:
    """Allow as many open files as clients and as many streams to workers need."""
    needed = 2 * max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < needed:
        log.warning("%d connections need %d open files, and the limit is %d (ulimit -n)", max_connections, needed, soft)


def bind(settings: RouterSettings) -> socket.socket:
    """Return the socket of the port. Raises CannotStart."""
    try:
        listener = listen(settings.host, settings.port, _BACKLOG)
    except OSError as error:
        raise CannotStart(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}") from None
    scheme = "http" if settings.tls_cert_file is None else "https"
    log.info("router port: %s://%s:%d", scheme, *listener.getsockname()[:2])
    return listener
