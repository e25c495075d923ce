"""Tests of one HTTP connection of the server, without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI
from uvicorn.protocols.http import httptools_impl

from specdecode_worker.contract import ServerConfig
from specdecode_worker.server.listening import BoundedHttpProtocol, ConnectionTable, Listener


class SilentTransport(asyncio.Transport):
    """Transport that sends nothing."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def write(self, data: object) -> None:
        pass

    def is_closing(self) -> bool:
        return False


class CountedCycle(httptools_impl.RequestResponseCycle):
    """Request that counts how often it is asked for its end."""

    asked = 0

    def __getattribute__(self, name: str) -> Any:
        CountedCycle.asked += name == "response_complete"
        return super().__getattribute__(name)


async def test_work_for_a_pipelined_request_does_not_grow_with_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httptools_impl, "RequestResponseCycle", CountedCycle)
    monkeypatch.setattr(CountedCycle, "asked", 0)
    table = ConnectionTable("public", ServerConfig(), 10)
    listener = Listener(FastAPI(), table, 1.0, None)
    connection = BoundedHttpProtocol(table, listener.config, listener.server_state, {})
    connection.connection_made(SilentTransport())
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n" * 500)
    assert len(connection.pipeline) == 499
    assert CountedCycle.asked < 10 * 500
