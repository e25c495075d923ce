"""Ports: connections with time-outs and bounds, TLS, bodies of requests, and errors as OpenAI's objects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import socket
import sys
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

import httptools
import msgspec
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from specdecode_worker.contract import ServerConfig, WorkerConfig
from specdecode_worker.engine.client import EngineClient
from specdecode_worker.engine.process import EngineWatchdog, State
from specdecode_worker.http_edge import BodyBudget, BodyReservation, TlsCertificate
from specdecode_worker.server.errors import ApiError, BodyTooLarge, EngineFailed, Unavailable, error_object
from specdecode_worker.termination import write_termination_message

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.05


class LifecycleState(Enum):
    """Lifecycle state of a worker, in the order in which a worker goes through them."""

    LOADING = auto()
    SERVING = auto()
    LEAVING = auto()
    DRAINING = auto()
    FAILED = auto()


class Lifecycle:
    """Current lifecycle state of a worker. A change to an earlier state is ignored."""

    def __init__(self) -> None:
        self.state = LifecycleState.LOADING
        self.failure = ""
        """Reason of the first failure; empty without a failure."""
        self.suspicion = ""
        """Reason why the engine may hang; empty while it makes progress."""
        self.on_leave: set[Callable[[], None]] = set()
        """Functions to call when the worker begins to leave. They must not raise."""

    def serve(self) -> None:
        """Change to SERVING: the model is loaded."""
        self._advance(LifecycleState.SERVING)

    def leave(self) -> None:
        """Change to LEAVING: not ready, but still serving new requests. Requests of routers move to other workers."""
        self._advance(LifecycleState.LEAVING)
        for notify in tuple(self.on_leave):
            notify()

    def drain(self) -> None:
        """Change to DRAINING: new requests are refused."""
        self._advance(LifecycleState.DRAINING)

    def fail(self, reason: str) -> None:
        """Change to FAILED. The first reason is kept."""
        self.failure = self.failure or reason
        self._advance(LifecycleState.FAILED)

    @property
    def healthy(self) -> bool:
        """True in every state except FAILED."""
        return self.state is not LifecycleState.FAILED

    @property
    def ready(self) -> bool:
        """True in SERVING only, and only while the engine makes progress."""
        return self.state is LifecycleState.SERVING and not self.suspicion

    @property
    def readiness(self) -> str:
        """State in lower case, with the suspicion if there is one."""
        name = self.state.name.lower()
        return f"{name}, but the engine makes {self.suspicion}" if self.suspicion else name

    @property
    def shutting_down(self) -> bool:
        """True in LEAVING and DRAINING."""
        return self.state in (LifecycleState.LEAVING, LifecycleState.DRAINING)

    def check_accepting(self) -> None:
        """Raise Unavailable unless the worker accepts new requests."""
        match self.state:
            case LifecycleState.LOADING:
                raise Unavailable("the model is still loading", code="loading")
            case LifecycleState.DRAINING:
                raise Unavailable("this worker is shutting down", code="draining")
            case LifecycleState.FAILED:
                raise Unavailable(f"this worker has failed: {self.failure}", code="engine_gone")
            case _:
                return

    def _advance(self, state: LifecycleState) -> None:
        if state.value > self.state.value:
            self.state = state


class GracefulShutdown:
    """Graceful shutdown of a worker. It starts once, at the first call of ``begin``; ``exit_now`` ends all waiting."""

    def __init__(
        self, lifecycle: Lifecycle, config: ServerConfig, running: Callable[[], int], exit_now: asyncio.Event
    ) -> None:
        self._lifecycle = lifecycle
        self._delay_seconds = config.endpoint_delay_seconds
        self._grace_seconds = config.grace_period_seconds
        self._running = running
        self._exit_now = exit_now
        self._drained: asyncio.Task[int] | None = None
        self.begun = asyncio.Event()

    def begin(self) -> asyncio.Task[int]:
        """Start the shutdown if it has not started, and return its task.

        Returns:
            The task; its result is the number of requests that are still running at the end of the drain.
        """
        if self._drained is None:
            # A worker that was never ready is in no endpoint list, so there is no removal to wait for.
            delay_seconds = self._delay_seconds if self._lifecycle.state is LifecycleState.SERVING else 0.0
            self._lifecycle.leave()
            self._drained = asyncio.create_task(self._drain(delay_seconds))
            self.begun.set()
        return self._drained

    async def _drain(self, delay_seconds: float) -> int:
        await self._pause(delay_seconds)
        self._lifecycle.drain()
        began = time.monotonic()
        while self._running() and not self._exit_now.is_set() and time.monotonic() - began < self._grace_seconds:
            await self._pause(_TICK_SECONDS)
        return self._running()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exit_now.wait(), seconds)


# Watch over the engine process: probes fail while it makes no progress, and a hung engine is killed.

_POLL_SECONDS = 0.1


async def watch_engine(engine: EngineClient, lifecycle: Lifecycle, step_timeout_seconds: float) -> None:
    """Watch the engine until it ends. A suspect engine makes the worker unready; a hung engine is killed."""
    watchdog = EngineWatchdog(step_timeout_seconds)
    while not engine.ended.done():
        assessment = watchdog.observe(engine.child.heartbeat, time.monotonic())
        if assessment.state is State.HUNG:
            await _end_hung_engine(engine, lifecycle, f"the engine hangs: {assessment}")
            return
        suspicion = str(assessment) if assessment.state is State.SUSPECT else ""
        if bool(suspicion) != bool(lifecycle.suspicion):
            log.warning(
                "not ready, the engine makes %s" if suspicion else "the engine makes progress again%s", suspicion
            )
        lifecycle.suspicion = suspicion
        await asyncio.sleep(_POLL_SECONDS)


async def _end_hung_engine(engine: EngineClient, lifecycle: Lifecycle, reason: str) -> None:
    """Fail the probes, write the facts and the engine's stacks, and kill the engine, which ends every stream.

    The stacks go to the log and the termination message only, because clients must not see them.
    """
    lifecycle.fail(reason)
    log.error("%s", reason)
    stacks = await engine.child.stacks()
    log.error("%s", stacks)
    write_termination_message(f"{reason}\n{stacks}")
    engine.kill(reason)


# Deadline for the end of the server process, which busy threads would otherwise delay.
#
# The interpreter waits for the threads of its executors before it exits. A thread that tokenizes a long text, or an
# engine process that waits for its device in the kernel, can take minutes.


class ExitDeadline:
    """Deadline after which the process ends with ``code``, whatever its threads do. It is not set at first."""

    def __init__(self) -> None:
        self.code = 1
        self._deadline_seconds = float("inf")

    def set(self, seconds: float) -> None:
        """End the process ``seconds`` from now. An earlier deadline stays in force."""
        self._deadline_seconds = min(self._deadline_seconds, time.monotonic() + seconds)
        timer = threading.Timer(seconds, self._exit)
        timer.daemon = True
        timer.start()

    @property
    def left_seconds(self) -> float:
        """Time until the deadline."""
        return self._deadline_seconds - time.monotonic()

    def _exit(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            print("the process ends at its deadline; a thread was still busy", file=sys.stderr, flush=True)
        os._exit(self.code)


# Vital parts of the server process: tasks and threads whose failure ends the worker.


class VitalParts:
    """Tasks that must live as long as the worker. ``failed`` resolves with the reason of the first failure."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._started: list[asyncio.Task[None]] = []

    def start(self, name: str, work: Coroutine[object, object, None]) -> None:
        """Run ``work`` as a vital task, until it ends or `stop` cancels it."""
        task = asyncio.create_task(work)
        self._started.append(task)
        self.watch(name, task)

    def watch(self, name: str, task: asyncio.Task[None]) -> None:
        """Treat an exception in ``task`` as the failure of the worker."""
        task.add_done_callback(lambda ended: self._ended(name, ended))

    async def stop(self) -> None:
        """Cancel the tasks that `start` started."""
        for task in self._started:
            task.cancel()
        await asyncio.gather(*self._started, return_exceptions=True)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("the %s failed", name, exc_info=error)
        if not self.failed.done():
            self.failed.set_result(f"the {name} failed: {type(error).__name__}: {error}")


# Ports: connections with time-outs and bounds, TLS, bodies of requests, and errors as OpenAI's objects.

# Pure rules of one client connection: its phase, and when the server closes it.
#
#     ARRIVING -> SERVING -> IDLE -> ARRIVING ...
#
# A connection is ARRIVING from its start, or from the first byte of a later request, until the last byte of the body.
# The caller passes the time, in seconds of one monotonic clock.

MAX_HEADER_BYTES = 64 * 1024
"""Limit of request line and headers together, the same as in h11."""
_FRAMING_FACTOR = 8
"""Bytes of chunked framing allowed for each byte of a body; a chunk of one byte has five."""
_EARLY_FACTOR = 0.95
"""Share of a time-out after which a half-open connection is closed.

The rest is for the interval of the checks and for a busy event loop, so that none is open longer than the time-out.
"""
KEEP_ALIVE_SECONDS = 75
"""Longest idle time of a connection.

It is longer than the connection pools of clients keep idle connections: the client then closes an idle connection
first, and no request is sent on a connection that the server has just closed.
"""


class ConnectionPhase(Enum):
    """Phase of a connection."""

    ARRIVING = auto()
    SERVING = auto()
    IDLE = auto()


class Cut(Enum):
    """Reason why the server closes a connection; the value is the text of the log line."""

    HEADERS_LATE = "the headers did not arrive in time"
    BODY_LATE = "the body did not arrive in time"
    IDLE = "it was idle"
    UNREAD = "the client does not read its answer"
    DISPLACED = "it was the oldest of too many connections without a request"


class ConnectionState:
    """State of one connection that decides when it is closed."""

    __slots__ = ("_stalled_since", "_unsent_bytes", "begun", "body_bytes", "has_headers", "paused", "phase",
                 "received_bytes", "since")  # fmt: skip

    def __init__(self, now: float) -> None:
        self.phase = ConnectionPhase.ARRIVING
        self.since = now
        """Time at which the phase began; for ARRIVING the start of the connection or the request's first byte."""
        self.begun = False
        """True once the first byte of the current request has arrived."""
        self.has_headers = False
        self.received_bytes = self.body_bytes = 0
        """Bytes that arrived after the piece in which the current request began, and bytes of its body."""
        self.paused = False
        """True while the transport has more unsent output than its high-water mark."""
        self._unsent_bytes = 0
        self._stalled_since: float | None = None

    def begin_request(self, now: float) -> None:
        """Record the first byte of a request. The first request counts from the start of the connection."""
        if self.phase is not ConnectionPhase.ARRIVING or self.begun:
            self.since = now
        self.phase, self.begun, self.has_headers = ConnectionPhase.ARRIVING, True, False
        self.received_bytes = self.body_bytes = 0

    def complete_request(self, now: float, *, answered: bool) -> None:
        """Record the last byte of a request; ``answered`` is true if the response was sent before that."""
        self.phase, self.since = (ConnectionPhase.IDLE if answered else ConnectionPhase.SERVING), now

    def complete_response(self, now: float) -> None:
        """Record that the whole response is written. A request that is still arriving keeps its deadline."""
        if self.phase is ConnectionPhase.SERVING:
            self.phase, self.since = ConnectionPhase.IDLE, now
        if self._stalled_since is not None:
            self._stalled_since = now

    @property
    def has_too_much_framing(self) -> bool:
        """True if headers, trailers and chunk framing of a request that is arriving exceed their limit."""
        is_arriving = self.phase is ConnectionPhase.ARRIVING
        framing_bytes = self.received_bytes - self.body_bytes
        return is_arriving and framing_bytes > MAX_HEADER_BYTES + _FRAMING_FACTOR * self.body_bytes

    def pause_writing(self, now: float) -> None:
        """Record that the unsent output exceeds the high-water mark."""
        self.paused, self._stalled_since = True, now

    def resume_writing(self, now: float) -> None:
        """Record that the client has read most of the unsent output."""
        self.paused, self._stalled_since = False, now

    def observe_unsent(self, unsent_bytes: int, now: float) -> None:
        """Record the size of the unsent output.

        A shrinking output is progress while a response is written. A paused connection must shrink to the low-water
        mark, and the rest of a complete response to nothing, so that a client cannot read a byte at a time for ever.
        """
        is_progress = self.phase is ConnectionPhase.SERVING and not self.paused and unsent_bytes < self._unsent_bytes
        if not unsent_bytes:
            self._stalled_since = None
        elif self._stalled_since is None or is_progress:
            self._stalled_since = now
        self._unsent_bytes = unsent_bytes

    def overdue(self, now: float, config: ServerConfig) -> Cut | None:
        """Return the reason to close the connection at time ``now``, or None."""
        if self._stalled_since is not None and now - self._stalled_since > config.write_timeout_seconds:
            return Cut.UNREAD
        seconds = now - self.since
        early = seconds / _EARLY_FACTOR
        match self.phase:
            case ConnectionPhase.ARRIVING if not self.has_headers and early > config.header_timeout_seconds:
                return Cut.HEADERS_LATE
            case ConnectionPhase.ARRIVING if early > config.body_timeout_seconds:
                return Cut.BODY_LATE
            case ConnectionPhase.IDLE if seconds > KEEP_ALIVE_SECONDS:
                return Cut.IDLE
            case _:
                return None


# Table of the open connections of one port: closes those that are overdue, and the oldest ones beyond the bound.

SWEEP_SECONDS = 0.2
"""Interval of the sweeps. One over 2,000 connections takes a millisecond."""


class ConnectionTable:
    """Open connections of one port, at most ``max_connections``, in the order in which they were accepted."""

    def __init__(self, port_name: str, config: ServerConfig, max_connections: int) -> None:
        self._port_name, self._config, self._max = port_name, config, max_connections
        # The values of a dict are not used; unlike a set, it keeps the order.
        self._connections: dict[BoundedHttpProtocol, None] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: BoundedHttpProtocol) -> bool:
        """Add a new connection. Return False if there is no place for it; the caller then refuses it.

        At the bound, the connection that has waited longest without a complete request makes place. Half-open
        connections therefore displace each other and not the clients that are served.
        """
        if len(self._connections) >= self._max:
            oldest = _longest_without_request(self._connections)
            if oldest is None:
                return False
            self.remove(oldest)
            self._log({Cut.DISPLACED: 1})
            oldest.cut(Cut.DISPLACED)
        self._connections[connection] = None
        return True

    def remove(self, connection: BoundedHttpProtocol) -> None:
        """Remove a connection that has ended."""
        self._connections.pop(connection, None)

    def sweep(self, now: float) -> None:
        """Close all connections that are overdue."""
        reasons: Counter[Cut] = Counter()
        for connection in list(self._connections):
            connection.state.observe_unsent(connection.unsent_bytes(), now)
            reason = connection.state.overdue(now, self._config)
            if reason is not None:
                reasons[reason] += 1
                connection.cut(reason)
        self._log(reasons)

    def _log(self, reasons: dict[Cut, int]) -> None:
        for reason, count in reasons.items():
            if reason is not Cut.IDLE:
                log.info("%s port: closed %d connections: %s", self._port_name, count, reason.value)


def _longest_without_request(connections: Iterable[BoundedHttpProtocol]) -> BoundedHttpProtocol | None:
    waiting = (one for one in connections if one.state.phase is not ConnectionPhase.SERVING)
    return min(waiting, key=lambda one: one.state.since, default=None)


# HTTP connection with time-outs and bounds: uvicorn's httptools protocol, observed by a `ConnectionTable`.

_LATE = (Cut.HEADERS_LATE, Cut.BODY_LATE)
MAX_PIPELINED = 16
"""Requests of a connection that may wait for the answers before theirs. uvicorn pauses reading for them, but reads on
at each answer, so it has no bound itself."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Protocol of one connection.

    It reports the phases of the connection to its state; the table closes the connection when it is overdue.
    """

    def __init__(
        self,
        table: ConnectionTable,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.state = ConnectionState(time.monotonic())
        self._table = table
        self._cycles: deque[RequestResponseCycle] = deque()
        """Requests of the connection, the oldest first; those answered leave when another one comes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse the connection with 503 if the table has no place for it."""
        super().connection_made(transport)
        # The limit of a TLS transport is much higher by default.
        transport.set_write_buffer_limits(high=HIGH_WATER_LIMIT)
        if not self._table.add(self):
            self._send_error(503, "too many connections; try again later", "too_many_connections")

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection that its client is gone."""
        self._table.remove(self)
        # uvicorn tells the newest request only, which is not the running one while a client pipelines requests.
        for cycle in self._unanswered():
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser. Answer 431 if headers, trailers or chunk framing exceed their limit."""
        self.state.received_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserError:
            if not self.transport.is_closing():
                self.send_400_response("Invalid HTTP request received.")
        if self.state.has_too_much_framing and not self.transport.is_closing():
            self._send_error(431, f"headers and framing exceed {MAX_HEADER_BYTES} bytes", "headers_too_large")

    def _feed(self, data: bytes) -> bytes:
        """Feed the parser. Return what must follow: the parser stops behind headers that offer an upgrade.

        An offer that is not taken is ignored (RFC 9110, 7.8), but the parser takes such a request to have no body. So
        it gets the headers again, without the offer.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if not self._offers_upgrade():  # CONNECT, which the application refuses
                return b""
            version = self.parser.get_http_version().encode()
            lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
            lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
            return b"\r\n".join([*lines, b"", data[offer.args[0] :]])
        return b""

    def _offers_upgrade(self) -> bool:
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def on_message_begin(self) -> None:
        """Record the first byte of a request."""
        super().on_message_begin()
        self.state.begin_request(time.monotonic())

    def on_headers_complete(self) -> None:
        """Record the end of the headers. Close the connection if too many requests wait for their answers."""
        if self._offers_upgrade():
            return
        if len(self.pipeline) == MAX_PIPELINED:
            self.transport.abort()
            raise httptools.HttpParserError("too many pipelined requests")
        self.state.has_headers = True
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        while self._cycles[0].response_complete:  # they are answered in order
            self._cycles.popleft()

    def on_body(self, body: bytes) -> None:
        """Count the bytes of the body."""
        self.state.body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record the last byte of a request."""
        if self._offers_upgrade():
            return
        super().on_message_complete()
        self.state.complete_request(time.monotonic(), answered=self.cycle.response_complete)

    def on_response_complete(self) -> None:
        """Record the end of a response, unless another request of the connection waits for its own."""
        if not self.pipeline:
            self.state.complete_response(time.monotonic())
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Record that the client reads too slowly."""
        self.state.pause_writing(time.monotonic())
        super().pause_writing()

    def resume_writing(self) -> None:
        """Record that the client has read most of the output."""
        self.state.resume_writing(time.monotonic())
        super().resume_writing()

    def unsent_bytes(self) -> int:
        """Return the size of the output that the transport still holds."""
        return self.transport.get_write_buffer_size()

    def cut(self, reason: Cut) -> None:
        """Close the connection. A client that is late with its request gets 408 first, if it waits for no answer."""
        owes_answer = any(one.response_started or not one.more_body for one in self._unanswered())
        answers = reason in _LATE and self.state.begun and not owes_answer
        if self.transport.is_closing() or self.unsent_bytes():
            self.transport.abort()
        elif answers:
            self._send_error(408, reason.value, "request_timeout")
        else:
            self.transport.close()

    def _unanswered(self) -> list[RequestResponseCycle]:
        return [one for one in self._cycles if not one.response_complete]

    def _send_error(self, status: int, message: str, code: str) -> None:
        """Send an error object and close the connection."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        body = msgspec.json.encode(error_object(message, kind, code=code))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


# HTTP listeners of the public and the admin port.

# Time for open connections to read the data already written, after the last request has ended.
_FLUSH_SECONDS = 2
# Connections of the admin port besides those of streams: the operator, routers and the kubelet need a few each.
_OTHER_ADMIN_CONNECTIONS = 256
# File descriptors for everything but connections: models, libraries, sockets of the engine, capture.
_OTHER_FILES = 256
# Bytes of unread output that the kernel holds for each connection; without it the kernel grows its buffer to megabytes.
_SEND_BUFFER_BYTES = 128 * 1024
_TLS_CHECK_SECONDS = 2.0
# Time for a client to answer the end of TLS before its connection is dropped.
_TLS_CLOSE_SECONDS = 1.0
# uvicorn calls `on_tick` ten times a second.
_TICKS_PER_SECOND = 10


class Listener(uvicorn.Server):
    """uvicorn server of one port, with bounded connections.

    It has no signal handlers of its own, because `serve` controls the shutdown of the process.
    """

    def __init__(
        self, app: FastAPI, table: ConnectionTable, handshake_seconds: float, tls: TlsCertificate | None
    ) -> None:
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
        self._table, self._handshake_seconds, self._tls = table, handshake_seconds, tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on ``sockets``."""
        protocol = partial(BoundedHttpProtocol, self._table, self.config, self.server_state, {})
        # The table sees a connection only after its handshake, so the handshake has the time-out of headers.
        handshake_seconds, close_seconds = (
            (None, None) if self._tls is None else (self._handshake_seconds, _TLS_CLOSE_SECONDS)
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
    config: WorkerConfig,
    tls: TlsCertificate | None,
    parts: VitalParts,
) -> AsyncIterator[None]:
    """Serve the public and the admin application on their sockets; a failure of a listener is one of ``parts``.

    On exit, open connections get some time to read the data already written.
    """
    server = config.server
    # A stream of a router is a connection of its own, whether its request runs or waits.
    admin_connections = config.engine.max_num_seqs + server.max_waiting + _OTHER_ADMIN_CONNECTIONS
    tables = (
        ConnectionTable("public", server, _affordable_connections(server.max_connections, admin_connections)),
        ConnectionTable("admin", server, admin_connections),
    )
    header_seconds = _EARLY_FACTOR * server.header_timeout_seconds
    listeners = [Listener(app, table, header_seconds, tls) for app, table in zip(apps, tables, strict=True)]
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


def _affordable_connections(max_connections: int, admin_connections: int) -> int:
    """Raise the limit of open files for the connections of both ports. Return how many the public one may have."""
    needed = max_connections + admin_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    affordable = max(soft - (needed - max_connections), 1)
    log.warning("at most %d connections, because the limit of open files is %d (ulimit -n)", affordable, hard)
    return affordable


# HTTP functions common to both ports: bounded bodies, OpenAI error objects, connection close at shutdown.

MAX_BODY_BYTES = 4 * 1024 * 1024
# A client that is still sending cannot read the response, so up to this much of an oversized body is read and dropped.
_DISCARD_BYTES = 16 * MAX_BODY_BYTES

Result = TypeVar("Result")


class ClientGone(Exception):
    """Error for a client that disconnected before its response was ready."""


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Read the request body. Until it is whole, its bytes count in the ``body_budget`` of the application's state.

    Args:
        request: The request.
        max_bytes: Largest size of the body.

    Raises:
        BodyTooLarge: The body exceeds ``max_bytes``.
        Unavailable: The bodies of all clients together exceed the budget.
        ClientGone: The client disconnected before its body was whole.
    """
    body, size = bytearray(), 0
    with BodyReservation(getattr(request.app.state, "body_budget", BodyBudget())) as reservation:
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size <= max_bytes and reservation.grow(len(chunk)):
                    body += chunk
                elif size > max(max_bytes, _DISCARD_BYTES):
                    break
                else:
                    body.clear()
                    reservation.release()
        except ClientDisconnect:
            raise ClientGone from None
    if size > max_bytes:
        raise BodyTooLarge(f"the body has more than {max_bytes} bytes")
    if reservation.exceeded:
        raise Unavailable("too many request bodies are arriving at once; try again later", code="too_many_bodies")
    return bytes(body)


async def cancel_on_disconnect(request: Request, work: Awaitable[Result]) -> Result:
    """Return the result of ``work``, or cancel it and raise ClientGone if the client disconnects first."""
    working = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((working, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, disconnected):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ApiError):
                await task


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def error_response(error: ApiError) -> Response:
    """Return the response for an error: its status, its headers and OpenAI's error object."""
    return JSONResponse(error.body(), status_code=error.status, headers=dict(error.headers))


def answer_errors(app: FastAPI) -> None:
    """Install the handlers that convert every error of ``app`` to an OpenAI error object."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _internal_error)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Convert the framework's error for an unknown path (404) or method (405)."""
    assert isinstance(error, HTTPException)
    # An application that is mounted below a path answers as one that is not.
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    message = f"{request.method} {path}: {error.detail}"
    body = error_object(message, "invalid_request_error")
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # not sent: the client has disconnected


async def _internal_error(request: Request, error: Exception) -> Response:
    # Uvicorn logs the exception with its traceback.
    failed = EngineFailed("the server failed on this request; its log says why", code="internal_error")
    response = error_response(failed)
    # The handler runs outside of `ResponseHeaders`.
    if request_id := getattr(request.state, "request_id", ""):
        response.headers[REQUEST_ID_HEADER] = request_id
    return response


REQUEST_ID_HEADER = "X-Request-Id"
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class ResponseHeaders:
    """ASGI middleware that adds ``X-Request-Id``, and ``Connection: close`` during shutdown.

    The id is that of the client, if it is valid in a header; it is also ``request.state.request_id``. Clients whose
    connection is closed reconnect to another worker.
    """

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request of the ASGI server."""
        sent = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                closing = [(b"connection", b"close")] if self._lifecycle.shutting_down else []
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode()), *closing]
            await send(message)

        await self._app(scope, receive, send_more)
