"""Tests of one HTTP connection of the server, without a socket."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI

from specdecode_worker.contract import ServerConfig
from specdecode_worker.server.listening import MAX_PIPELINED, BoundedHttpProtocol, ConnectionTable, Listener


class SilentTransport(asyncio.Transport):
    """Transport that sends nothing."""

    closing = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def write(self, data: object) -> None:
        assert not self.closing

    def abort(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing


async def test_connection_with_too_many_pipelined_requests_is_closed() -> None:
    table = ConnectionTable("public", ServerConfig(), 10)
    listener = Listener(FastAPI(), table, 1.0, None)
    connection = BoundedHttpProtocol(table, listener.config, listener.server_state, {})
    transport = SilentTransport()
    connection.connection_made(transport)
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n" * (1 + MAX_PIPELINED))
    assert (len(connection.pipeline), transport.closing) == (MAX_PIPELINED, False)
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n" * 500)
    assert (len(connection.pipeline), transport.closing) == (MAX_PIPELINED, True)
