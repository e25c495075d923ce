"""TCP proxy that can become silent: connections stay open, but no byte passes, as after a lost route."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType


class TcpProxy:
    """Proxy from a port of the loopback address to one server."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = 0
        self.accepted = 0
        """Number of connections so far."""
        self._target = (host, port)
        self._silent_before = 0
        """Connections with a lower number are silent."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def silence_open_connections(self) -> None:
        """Pass nothing more on connections that are open; new ones work."""
        self._silent_before = self.accepted

    def silence_all(self) -> None:
        """Pass nothing more, and nothing on new connections either."""
        self._silent_before = 2**31

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.accepted
        self.accepted += 1
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(number, source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, number: int, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if number >= self._silent_before:
                    sink.write(data)
                    await sink.drain()
        if number >= self._silent_before:
            sink.close()
