"""TCP proxy whose connections can be cut, or go silent: open, but no byte passes, as after a lost route."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class TcpProxy:
    """Proxy from a port of the loopback address to one server, in threads of its own."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._accepted = 0
        self._silent_before = 0
        """Connections with a lower number are silent."""
        self._is_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def silence_open_connections(self) -> None:
        """Pass nothing more on connections that are open; new ones work."""
        self._silent_before = self._accepted

    def silence_all(self) -> None:
        """Pass nothing more, and nothing on new connections either."""
        self._silent_before = 2**31

    def cut(self) -> None:
        """Break all connections, and new ones until it is mended."""
        self._is_cut = True
        for end in self._open:
            _reset(end)
        self._open = []

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            number, self._accepted = self._accepted, self._accepted + 1
            if self._is_cut:
                _reset(near)
                continue
            far = socket.create_connection(self._target)
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(number, source, sink), daemon=True).start()

    def _pump(self, number: int, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if number >= self._silent_before:
                    sink.sendall(data)
        if number >= self._silent_before:
            _reset(sink)


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
