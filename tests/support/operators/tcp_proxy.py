"""TCP proxy whose connections can be cut, or go silent: open, but no byte passes, as after a lost route."""

from __future__ import annotations

import asyncio
import ssl
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any


class TcpProxy:
    """Proxy from a port of the loopback address to one server, on an event loop in a thread of its own."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Listen. With ``tls`` the proxy speaks it to the server, and plain text to its clients."""
        self.host = host
        self._target = host, port, tls
        self._open: set[StreamWriter] = set()
        self._accepted = 0
        self._silent_before = 0
        """Connections with a lower number are silent."""
        self._is_cut = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._connect, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def sent(self, data: bytes) -> None:
        """Take note of what a client sends."""

    def silence_open_connections(self) -> int:
        """Pass nothing more on connections that are open, and return their number; new ones work."""
        self._silent_before = self._accepted
        return len(self._open) // 2

    def silence_all(self) -> None:
        """Pass nothing more, and nothing on new connections either."""
        self._silent_before = 2**31

    def cut(self) -> None:
        """Break all connections, and new ones until it is mended."""
        self._is_cut = True
        self._run(self._break())

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _break(self) -> None:
        for end in self._open:
            end.transport.abort()
        while self._open:
            await asyncio.sleep(0.001)

    async def _connect(self, reader: StreamReader, writer: StreamWriter) -> None:
        number, self._accepted = self._accepted, self._accepted + 1
        ends = {writer}
        with suppress(OSError):
            if not self._is_cut:
                host, port, tls = self._target
                far_reader, far_writer = await asyncio.open_connection(host, port, ssl=tls)
                ends.add(far_writer)
                self._open |= ends
                forth = self._pump(number, reader, far_writer, self.sent)
                back = self._pump(number, far_reader, writer, lambda data: None)
                await asyncio.gather(forth, back)
        self._open -= ends
        for end in ends:
            end.close()

    async def _pump(self, number: int, source: StreamReader, sink: StreamWriter, note: Callable[[bytes], None]) -> None:
        """Pass bytes on, and the end of them. On a silent connection neither arrives."""
        with suppress(OSError):
            while data := await source.read(65536):
                if number >= self._silent_before:
                    note(data)
                    sink.write(data)
                    await sink.drain()
        if number >= self._silent_before:
            sink.close()
