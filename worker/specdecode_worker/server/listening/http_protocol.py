"""HTTP connection with time-outs and bounds: uvicorn's httptools protocol, observed by a `ConnectionTable`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from specdecode_worker.server.listening.connection_state import MAX_HEADER_BYTES, ConnectionState, Cut, Phase
from specdecode_worker.server.listening.connection_table import ConnectionTable

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

_LATE = (Cut.HEADERS_LATE, Cut.BODY_LATE)


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
        self._running: RequestResponseCycle | None = None
        self._fed_body_bytes = 0
        self._request_began = False

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
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser. Answer 431 if headers, trailers or chunk framing exceed their limit."""
        self._fed_body_bytes, self._request_began = 0, False
        super().data_received(data)
        if self._request_began or self.state.phase is not Phase.ARRIVING:
            return  # the counters belong to a request that began or ended within these data
        self.state.count_received(len(data), self._fed_body_bytes)
        if self.state.has_too_much_framing and not self.transport.is_closing():
            self._send_error(431, f"headers and framing exceed {MAX_HEADER_BYTES} bytes", "headers_too_large")

    def on_message_begin(self) -> None:
        """Record the first byte of a request."""
        super().on_message_begin()
        self._request_began = True
        self.state.begin_request(time.monotonic())

    def on_headers_complete(self) -> None:
        """Record the end of the headers."""
        self.state.has_headers = True
        super().on_headers_complete()
        if self.pipeline:
            self.state.queue_request()

    def on_body(self, body: bytes) -> None:
        """Count the bytes of the body."""
        self._fed_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record the last byte of a request."""
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
        """Close the connection. A client that is late with its request gets 408 first."""
        answers = reason in _LATE and self.state.begun and not self._is_answering
        if self.transport.is_closing() or self.unsent_bytes():
            self.transport.abort()
        elif answers:
            self._send_error(408, reason.value, "request_timeout")
        else:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        if cycle.more_body and self.state.phase is Phase.SERVING:
            self.state.start_queued_request(time.monotonic())
        super()._start_asgi_task(cycle, app)

    def _send_error(self, status: int, message: str, code: str) -> None:
        """Send an error object and close the connection."""
        body = msgspec.json.encode(
            {"error": {"message": message, "type": "invalid_request_error" if status < 500 else "server_error",
                       "param": None, "code": code}}
        )  # fmt: skip
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
