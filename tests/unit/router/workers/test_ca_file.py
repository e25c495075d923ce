"""TLS to workers: the file of CA certificates is read again when it changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from specdecode_router.workers.client import WorkerClient
from support.certificates import certified_server
from support.stand_in_worker import TOKEN


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
    writer.close()


async def test_a_changed_ca_file_is_read_again(tmp_path: Path) -> None:
    before, _ = certified_server(tmp_path, "before")
    after, context = certified_server(tmp_path, "after")
    ca_file = tmp_path / "ca.crt"
    ca_file.write_bytes(before.read_bytes())
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = WorkerClient(lambda url: (TOKEN,), connect_seconds=5, ca_file=str(ca_file))
    try:
        with pytest.raises(aiohttp.ClientSSLError):
            await client.get(url, "/", 5, {})
        ca_file.write_bytes(after.read_bytes())
        client.ca.refresh()
        assert await client.get(url, "/", 5, {}) == (200, b"ok")
        ca_file.write_bytes(b"no certificate")
        client.ca.refresh()
        assert await client.get(url, "/", 5, {}) == (200, b"ok"), "the last good ones stay"
    finally:
        await client.close()
        server.close()
