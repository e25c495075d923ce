"""TLS to workers: the file of CA certificates is read again when it changes."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest

from specdecode_router.workers.client import WorkerClient
from support.stand_in_worker import TOKEN


def make_certificate(folder: Path, name: str) -> tuple[bytes, ssl.SSLContext]:
    """Return a self-signed certificate without any address in it, and a server context with it."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    words = ["openssl", "req", "-x509", "-nodes", "-days", "1", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-subj", f"/CN={name}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(words, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate.read_bytes(), context


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
    writer.close()


async def test_a_changed_ca_file_is_read_again(tmp_path: Path) -> None:
    before, _ = make_certificate(tmp_path, "before")
    after, context = make_certificate(tmp_path, "after")
    ca_file = tmp_path / "ca.crt"
    ca_file.write_bytes(before)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = WorkerClient(lambda url: (TOKEN,), connect_seconds=5, ca_file=str(ca_file))
    try:
        with pytest.raises(aiohttp.ClientSSLError):
            await client.get(url, "/", 5, {})
        ca_file.write_bytes(after)
        client.ca.refresh()
        assert await client.get(url, "/", 5, {}) == (200, b"ok")
        ca_file.write_bytes(b"no certificate")
        client.ca.refresh()
        assert await client.get(url, "/", 5, {}) == (200, b"ok"), "the last good ones stay"
    finally:
        await client.close()
        server.close()
