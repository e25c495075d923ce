"""Tests of the public and the admin port together, on sockets."""

from __future__ import annotations

import asyncio
import socket

from fastapi import FastAPI

from specdecode_worker.contract import EngineConfig, ModelConfig, WorkerConfig
from specdecode_worker.server.listening import VitalParts, listening


async def test_every_stream_of_the_routers_has_a_connection() -> None:
    streams, running, all_run = 300, 0, asyncio.Event()
    admin = FastAPI()

    @admin.get("/stream")
    async def stream() -> str:
        nonlocal running
        running += 1
        if running == streams:
            all_run.set()
        await all_run.wait()
        return "the end"

    async def answer(address: tuple[str, int]) -> bytes:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = await reader.read()
        writer.close()
        return received

    config = WorkerConfig(
        model=ModelConfig(uri="file:///m", served_name="m"), engine=EngineConfig(max_num_seqs=streams)
    )
    sockets = [socket.create_server(("127.0.0.1", 0), backlog=streams) for _ in range(2)]
    async with listening((FastAPI(), admin), sockets, config, None, VitalParts()), asyncio.timeout(20):
        answers = await asyncio.gather(*(answer(sockets[1].getsockname()) for _ in range(streams)))
    assert all(one.startswith(b"HTTP/1.1 200 ") for one in answers)
