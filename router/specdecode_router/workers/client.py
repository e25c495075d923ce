"""Calls to the workers' admin ports: internal streams, forwarded public requests, and loads."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import AddrInfoType
from yarl import URL

from specdecode_worker.contract.internal_stream import INTERNAL_STREAMS
from specdecode_worker.http_edge import ReloadedFiles, fingerprint_of

PUBLIC_PREFIX = "/internal/v1/public"
"""Path below which a worker answers requests of its public port."""
_READ_BYTES = 64 * 1024
"""Bytes of one stream that wait unread in this process before its connection is paused."""
_RECEIVE_BUFFER_BYTES = 128 * 1024
_KEEP_ALIVE_SECONDS = 15
"""Idle time of a connection. A worker closes idle connections later, so none is closed while a request is sent."""


class WorkerClient:
    """HTTP client for all workers. Close it with ``close``."""

    def __init__(
        self, tokens: Callable[[str], Sequence[str]], *, connect_seconds: float, ca_file: str | None = None
    ) -> None:
        """Open the client on the running event loop.

        Args:
            tokens: Returns the admin tokens of the worker with a base URL, the current one first.
            connect_seconds: Time for a connection.
            ca_file: Certificates that sign those of the workers.

        Raises:
            UnusableFiles: The file with certificates is unusable.
        """
        self._tokens = tokens
        self.ca = read_ca_file(ca_file)
        """Certificates that sign those of the workers."""
        # The handshake of TLS is part of the time for a connection.
        timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=connect_seconds)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS, socket_factory=_bounded_socket)
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
        headers = {"Content-Type": "application/msgpack", **(headers or {})}
        return await self._request("POST", admin_url, INTERNAL_STREAMS, headers, data=body, trace_request_ctx=on_sent)

    async def forward(
        self, admin_url: str, method: str, path: str, body: bytes, headers: Mapping[str, str], seconds: float
    ) -> aiohttp.ClientResponse:
        """Send a public request to a worker. ``path`` is encoded and has the query."""
        timeout = aiohttp.ClientTimeout(total=seconds)
        path = PUBLIC_PREFIX + path
        return await self._request(
            method, admin_url, path, headers, data=body or None, timeout=timeout, allow_redirects=False
        )

    async def get(self, admin_url: str, path: str, seconds: float, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Return status and body of a GET."""
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with await self._request("GET", admin_url, path, headers, timeout=timeout) as response:
            return response.status, await response.read()

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def _request(
        self, method: str, admin_url: str, path: str, headers: Mapping[str, str], **fields: Any
    ) -> aiohttp.ClientResponse:
        """Send a request with the first token, and with the next one after a 401.

        While the tokens are replaced, a worker may have read its files earlier or later than this router.
        """
        url, fields = URL(admin_url + path, encoded=True), {**fields, "ssl": self.ca.current}
        *first, last = self._tokens(admin_url)
        for token in first:
            response = await self._session.request(method, url, headers={**headers, **_bearer(token)}, **fields)
            if response.status != 401:
                return response
            response.release()
        return await self._session.request(method, url, headers={**headers, **_bearer(last)}, **fields)


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


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


def read_ca_file(path: str | None) -> ReloadedFiles[ssl.SSLContext | bool]:
    """Return the certificates of a file, as TLS settings of calls; without one they are the system's.

    Raises:
        UnusableFiles: The file is unusable.
    """
    files = [] if path is None else [Path(path)]

    def read() -> ssl.SSLContext | bool:
        if path is None:
            return True
        context = ssl.create_default_context(cafile=path)
        # Workers are called by IP address, and one certificate is shared by pods whose addresses are not known when it
        # is issued. The signature of the CA is still required.
        context.check_hostname = False
        return context

    return ReloadedFiles(f"CA file {path}", read, lambda: fingerprint_of(files))


class TokenFile(ReloadedFiles[Sequence[str]]):
    """Admin tokens of a file, one a line and the current one first. An empty file leaves the last ones in use."""

    current: Sequence[str] = ("",)

    def __init__(self, path: str, *, required: bool = True) -> None:
        """Read the file.

        Args:
            path: Path of the file.
            required: False for a file that may appear later. Until then the only token is empty.

        Raises:
            UnusableFiles: A required file has no token.
        """
        self._path, self._required = Path(path), required
        super().__init__(f"admin token file {path}", self._tokens, lambda: fingerprint_of(self._files()))

    def __call__(self) -> Sequence[str]:
        """Return the tokens, at least one."""
        return self.current

    def _files(self) -> list[Path]:
        return [self._path] if self._required or self._path.exists() else []

    def _tokens(self) -> Sequence[str]:
        tokens = [token for file in self._files() for token in file.read_text().split()]
        if self._required and not tokens:
            raise ValueError("it is empty")
        return tokens or self.current
