"""Calls to the workers' admin ports: internal streams, forwarded public requests, and loads."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import aiohttp
from aiohttp import AddrInfoType
from yarl import URL

from specdecode_router.errors import CannotStart
from specdecode_worker.contract.internal_stream import INTERNAL_STREAMS

PUBLIC_PREFIX = "/internal/v1/public"
"""Path below which a worker answers requests of its public port."""
_READ_BYTES = 64 * 1024
"""Bytes of one stream that wait unread in this process before its connection is paused."""
_RECEIVE_BUFFER_BYTES = 128 * 1024
_KEEP_ALIVE_SECONDS = 15
"""Idle time of a connection. A worker closes idle connections later, so none is closed while a request is sent."""


class WorkerClient:
    """HTTP client for all workers. Close it with ``close``."""

    def __init__(self, token: Callable[[str], str], *, connect_seconds: float, ca_file: str | None = None) -> None:
        """Open the client on the running event loop.

        Args:
            token: Returns the current admin token of the worker with a base URL.
            connect_seconds: Time for a connection.
            ca_file: Certificates that sign those of the workers.

        Raises:
            CannotStart: The file with certificates is unusable.
        """
        self._token = token
        # The handshake of TLS is part of the time for a connection.
        timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=connect_seconds)
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS, ssl=_tls(ca_file), socket_factory=_bounded_socket
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            read_bufsize=_READ_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trace_configs=[_sent_trace()],
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
        )

    async def open_stream(
        self,
        admin_url: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> aiohttp.ClientResponse:
        """Post a request for an internal stream and return the response once its headers are there.

        Args:
            admin_url: Base URL of the worker's admin port.
            body: The request.
            headers: Further headers.
            on_sent: Called when the headers of the request are sent; its body follows at once.
        """
        return await self._session.post(
            URL(admin_url + INTERNAL_STREAMS, encoded=True),
            data=body,
            headers={**self._headers(admin_url), "Content-Type": "application/msgpack", **(headers or {})},
            trace_request_ctx=on_sent,
        )

    async def forward(
        self, admin_url: str, method: str, path: str, body: bytes, headers: Mapping[str, str], seconds: float
    ) -> aiohttp.ClientResponse:
        """Send a public request to a worker. ``path`` is encoded and has the query."""
        return await self._session.request(
            method,
            URL(admin_url + PUBLIC_PREFIX + path, encoded=True),
            data=body or None,
            headers={**headers, **self._headers(admin_url)},
            timeout=aiohttp.ClientTimeout(total=seconds),
            allow_redirects=False,
        )

    async def get(self, admin_url: str, path: str, seconds: float, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Return status and body of a GET."""
        timeout = aiohttp.ClientTimeout(total=seconds)
        url = URL(admin_url + path, encoded=True)
        async with self._session.get(url, headers={**headers, **self._headers(admin_url)}, timeout=timeout) as response:
            return response.status, await response.read()

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def _headers(self, admin_url: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token(admin_url)}"}


def _sent_trace() -> aiohttp.TraceConfig:
    """Return the trace that calls the function of a request when its headers are sent."""

    async def sent(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx()

    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(sent)
    return trace


def _bounded_socket(address: AddrInfoType) -> socket.socket:
    """Return a socket whose kernel buffer does not grow to megabytes while its stream is not read."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    return made


def _tls(ca_file: str | None) -> ssl.SSLContext | bool:
    if ca_file is None:
        return True
    try:
        context = ssl.create_default_context(cafile=ca_file)
        # Workers are called by IP address, and one certificate is shared by pods whose addresses are not known when it
        # is issued. The signature of the CA is still required.
        context.check_hostname = False
        return context
    except (OSError, ssl.SSLError) as error:
        raise CannotStart(f"CA file {ca_file}: {error}") from None


class TokenFile:
    """Admin token of a file that is read again when it changes."""

    def __init__(self, path: str, *, required: bool = True) -> None:
        """Read the file.

        Args:
            path: Path of the file.
            required: False for a file that may appear later. Until then the token is empty.

        Raises:
            CannotStart: A required file has no token.
        """
        self._path, self._required = Path(path), required
        self._version: tuple[int, int, int] | None = None
        self._token = ""
        try:
            self.refresh()
        except OSError as error:
            raise CannotStart(f"admin token file {path}: {error.strerror or error}") from None
        if required and not self._token:
            raise CannotStart(f"admin token file {path}: it is empty")

    def __call__(self) -> str:
        """Return the token."""
        return self._token

    def refresh(self) -> None:
        """Read the file if it changed. Raises OSError; the last token stays in use."""
        if not self._required and not self._path.exists():
            return
        stat = self._path.stat()
        version = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if version != self._version:
            self._token = self._path.read_text().strip() or self._token
            self._version = version
