"""Clients that misbehave on purpose, as bare sockets: half-open requests and clients that never read."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

Client = socket.socket


def connect(url: str, *, receive_buffer_bytes: int | None = None) -> socket.socket:
    """Connect to the host and port of ``url``. A small receive buffer lets little output leave the server."""
    parts = httpx.URL(url)
    connection = socket.socket()
    if receive_buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    connection.settimeout(10)
    connection.connect((parts.host, parts.port or 80))
    return connection


def post_of(path: str, body: Mapping[str, Any] | bytes, *, host: str = "x", headers: str = "") -> bytes:
    """Return a whole request; ``headers`` are further lines of it."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\n{headers}Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def deaf_client(url: str, path: str, body: Mapping[str, Any] | bytes, headers: str = "") -> socket.socket:
    """Send a whole request and read nothing of its answer."""
    connection = connect(url, receive_buffer_bytes=4096)
    connection.sendall(post_of(path, body, host=httpx.URL(url).netloc.decode(), headers=headers))
    return connection


def half_open_post(url: str, path: str) -> socket.socket:
    """Send the headers of a request and the first byte of its body."""
    connection = connect(url)
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
    return connection


def half_headers(url: str) -> socket.socket:
    """Send part of the headers of a request."""
    connection = connect(url)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-")
    return connection


def half_open_requests(url: str) -> Iterator[tuple[socket.socket, float]]:
    """Open requests that never become whole, and yield each with the time at which it was opened."""
    for _ in range(300):
        yield half_open_post(url, "/v1/completions"), time.monotonic()
    for _ in range(10):
        yield half_headers(url), time.monotonic()


def send(url: str, data: bytes) -> bytes:
    """Send bytes, end the sending side, and return what the server answers before it closes the connection."""
    with connect(url) as connection:
        with contextlib.suppress(OSError):  # shutdown says "not connected" where the server has reset the connection
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        return received(connection)


def received(connection: socket.socket) -> bytes:
    """Return what the server sends before it closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(65536):
            answer += data
    return answer


def assert_closed(opened: Mapping[socket.socket, float], limit_seconds: float) -> None:
    """Assert that the server closes each connection so many seconds after its time."""
    poll = select.poll()
    is_open = {connection.fileno(): connection for connection in opened}
    for descriptor in is_open:
        poll.register(descriptor, select.POLLIN)
    closed: list[float] = []
    while is_open and (left := max(opened.values()) + limit_seconds - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(1000 * left):
            if _has_ended(is_open[descriptor]):
                closed.append(time.monotonic() - opened[is_open[descriptor]])
                poll.unregister(descriptor)
                del is_open[descriptor]
    print(f"{len(closed)} of {len(opened)} closed, the last after {max(closed, default=0):.1f} s")
    assert len(closed) == len(opened)
    assert max(closed) <= limit_seconds


def _has_ended(connection: socket.socket) -> bool:
    """Read what has arrived. Return whether it was the end of the connection."""
    try:
        return not connection.recv(65536)
    except ConnectionError:
        return True
