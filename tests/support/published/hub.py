"""Local test hub with the API of the Hugging Face hub, which can simulate failures.

It needs Python's standard library alone, so that it also runs in a pod.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" * 6 + "beef"
NEWER_COMMIT = "decade" * 6 + "beef"
LARGE = (".safetensors", ".bin")


@dataclass
class Repository:
    """The ``files`` of one repository, and the failures to simulate."""

    files: Mapping[str, bytes]
    name: str = "org/model"
    token: str | None = None
    """Token required for every request."""
    cut_after: int | None = None
    """Number of bytes after which every response with a large file is cut off."""
    ignores_range: bool = False
    tampered: str = ""
    """Name of a file to send with content that differs from its announced hash."""
    busy: int = 0
    """Number of initial requests to answer with 503."""
    head: str = COMMIT
    """Commit that the branch main has."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, Range) of every request received."""


class StandInHub:
    """HTTP server of the test hub. Use it as a context manager; ``url`` is the endpoint."""

    def __init__(self, *repositories: Repository, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on ``host``. Large files are redirected to ``localhost``, or with another host to its address."""
        large = "localhost" if host == "127.0.0.1" else socket.gethostbyname(socket.gethostname())
        named = {one.name: one for one in repositories}
        self.unknown: list[str] = []
        """Paths of requests for anything but the repositories."""
        handler = type("Handler", (_Handler,), {"repositories": named, "large_host": large, "unknown": self.unknown})
        self._server = ThreadingHTTPServer((host, port), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> StandInHub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


_LISTING = re.compile(r"/api/models/(?P<model>[\w.-]+/[\w.-]+)/revision/(?P<revision>[\w.-]+)")
_FILE = re.compile(r"/(?P<model>[\w.-]+/[\w.-]+)/resolve/(?P<commit>[0-9a-f]{40})/(?P<name>.+)")
_STORED = re.compile(r"/storage/(?:(?P<model>[\w.-]+/[\w.-]+)/)?(?P<commit>[0-9a-f]{40})/(?P<name>.+)")


class _Handler(BaseHTTPRequestHandler):
    repositories: Mapping[str, Repository]
    large_host: str
    unknown: list[str]
    repository: Repository
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        asked = _LISTING.fullmatch(self.path) or _STORED.fullmatch(self.path) or _FILE.fullmatch(self.path)
        model = "org/model" if asked is None else asked["model"] or "org/model"
        if asked is None or model not in self.repositories:
            self.unknown.append(self.path)
            return self._answer(404, b"no such repository")
        hub = self.repository = self.repositories[model]
        hub.requests.append((self.command, self.path, self.headers.get("Range")))
        if hub.busy:
            hub.busy -= 1
            return self._answer(503, b"busy")
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}" and asked.re is not _STORED:
            return self._answer(401, b"gated")
        commits = (COMMIT, NEWER_COMMIT, hub.head)
        if asked.re is _LISTING:
            revision = asked["revision"]
            if revision not in ("main", *commits):
                return self._answer(404, b"no such revision")
            listing = {
                "id": model,
                "sha": hub.head if revision == "main" else revision,
                "siblings": [{"rfilename": name} for name in hub.files],
            }
            return self._answer(200, json.dumps(listing).encode())
        name = asked["name"]
        if name not in hub.files or asked["commit"] not in commits:
            return self._answer(404, b"no such file")
        if asked.re is _STORED:
            # Large files are served by another host, which must never receive the token.
            assert "Authorization" not in self.headers
            return self._content(name)
        if name.endswith(LARGE):
            digest = hashlib.sha256(hub.files[name]).hexdigest()
            host = f"{self.large_host}:{self.server.server_address[1]}"
            place = COMMIT if model == "org/model" else f"{model}/{asked['commit']}"
            headers = {
                "Location": f"http://{host}/storage/{place}/{name}",
                "X-Linked-Etag": f'"{digest}"',
                "X-Linked-Size": str(len(hub.files[name])),
                "ETag": '"of the redirect"',
            }
            return self._answer(302, b"", headers)
        return self._content(name)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        """Move the branch main of all repositories to a commit, and answer with all requests so far."""
        commit = self.rfile.read(int(self.headers["Content-Length"])).decode()
        for hub in self.repositories.values():
            hub.head = commit
        requests = [request for hub in self.repositories.values() for request in hub.requests]
        self._answer(200, json.dumps(requests).encode())

    def _content(self, name: str) -> None:
        hub, content = self.repository, self.repository.files[name]
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        headers = {"ETag": f'W/"{blob}"'}
        start, end = 0, len(content)
        if (wanted := self.headers.get("Range")) and not hub.ignores_range:
            first, last = wanted.removeprefix("bytes=").split("-")
            start, end = int(first), int(last) + 1
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        sent = bytes(byte ^ 1 for byte in content) if name == hub.tampered else content
        cut = hub.cut_after if name.endswith(LARGE) else None
        self._answer(206 if "Content-Range" in headers else 200, sent[start:end], headers, cut)

    def _answer(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None and cut < len(body):
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass
