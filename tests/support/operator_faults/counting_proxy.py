"""A proxy between a local operator and the API server that counts requests and can freeze its connections.

It speaks plain HTTP to the operator and TLS with the test's credentials to the API server, so that it sees every
request line. A frozen connection stays open and forwards nothing, as after a lost route: a half-open connection.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from support.operator_faults.api_client import Api

REQUEST = re.compile(rb"^(GET|POST|PUT|PATCH|DELETE) (\S+) HTTP/1\.1\r\n", re.MULTILINE)
CHUNK = 65536
WRITES = ("POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True, slots=True)
class SentRequest:
    """One request of the operator."""

    at: float
    method: str
    url: str

    @property
    def path(self) -> str:
        return urlsplit(self.url).path


@dataclass(slots=True)
class _Link:
    """One connection; ``frozen`` links swallow what they receive."""

    frozen: bool = False


@dataclass(slots=True)
class CountingProxy:
    """The proxy. ``requests`` grows while the operator works."""

    api: Api
    requests: list[SentRequest] = field(default_factory=list)
    port: int = 0
    _links: list[_Link] = field(default_factory=list)

    def freeze(self) -> int:
        """Make every present connection half-open and return their number. Later connections work."""
        links = [link for link in self._links if not link.frozen]
        for link in links:
            link.frozen = True
        return len(links)

    def writes_since(self, started: float) -> list[SentRequest]:
        """Return the writes from a time on, without renewals of Leases."""
        writes = [one for one in list(self.requests) if one.method in WRITES and "/leases" not in one.path]
        return [one for one in writes if one.at >= started]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect one client to the API server until either side closes or the proxy ends."""
        with suppress(asyncio.CancelledError, OSError):
            await self._connect(reader, writer)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = urlsplit(self.api.host)
        link = _Link()
        self._links.append(link)
        try:
            upstream = await asyncio.open_connection(target.hostname, target.port or 443, ssl=self.api.tls)
            pumps = [
                asyncio.create_task(self._pump(link, reader, upstream[1], count=True)),
                asyncio.create_task(self._pump(link, upstream[0], writer, count=False)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if not link.frozen:
                for pump in pumps:
                    pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            upstream[1].close()
        finally:
            writer.close()
            self._links.remove(link)

    async def _pump(
        self, link: _Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, count: bool
    ) -> None:
        while data := await source.read(CHUNK):
            if link.frozen:
                continue
            if count:
                now = time.monotonic()
                self.requests += [
                    SentRequest(now, method.decode(), url.decode()) for method, url in REQUEST.findall(data)
                ]
            sink.write(data)
            await sink.drain()
        if link.frozen:  # the close of one side does not reach the other
            await asyncio.sleep(3600)


@contextmanager
def counting_proxy(api: Api) -> Iterator[CountingProxy]:
    """Run a proxy in a thread while the block runs."""
    proxy, loop, started = CountingProxy(api), asyncio.new_event_loop(), threading.Event()

    async def run() -> None:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        proxy.port = server.sockets[0].getsockname()[1]
        started.set()
        with suppress(asyncio.CancelledError):
            await server.serve_forever()

    task = loop.create_task(run())
    thread = threading.Thread(target=loop.run_until_complete, args=(task,), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(lambda: [each.cancel() for each in asyncio.all_tasks(loop)])
        thread.join(10)
