"""Fetching of captured segments from the admin ports of all workers of a deployment.

A headless Service's name resolves to all workers. Each segment is fetched once, by name and hash. A worker that does
not answer is skipped and named.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pydantic

from specdecode_worker.capture.records import CapturePullFailed
from specdecode_worker.capture.segments import (
    PARTIAL_SUFFIX,
    READ_BYTES,
    ListedSegment,
    Retention,
    SegmentListing,
    list_segments,
    open_private,
    store_retention,
)
from specdecode_worker.contract.names import Route
from specdecode_worker.files import flush

FETCHED_FOLDER = "captured"
"""Folder of fetched segments in the folder of a run of `distill`."""
DEFAULT_MAX_BYTES = 4 * 2**30
_MAX_LISTING_BYTES = 4 * 2**20
_CONNECT_SECONDS, _READ_SECONDS = 10.0, 120.0
"""A listing may read gigabytes from the worker's disk before its first byte."""


@dataclass(frozen=True, slots=True)
class PullSource:
    """Workers to fetch from. ``tls`` is None for plain HTTP. ``max_bytes`` bounds what is stored."""

    host: str
    port: int
    token: str
    tls: ssl.SSLContext | None = None
    max_bytes: int = DEFAULT_MAX_BYTES


def pull_source(address: str, token: str | None, ca_file: str | None, max_bytes: int = DEFAULT_MAX_BYTES) -> PullSource:
    """Return the source that the flags describe.

    Args:
        address: ``HOST:PORT``, with ``https://`` in front for TLS.
        token: Token with the scope capture. Of several lines, as the tokens Secret has them, the first counts.
        ca_file: Certificates that sign those of the workers; implies TLS.
        max_bytes: Bound of what is stored.

    Raises:
        CapturePullFailed: An argument is unusable; the message says which.
    """
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None or parts.scheme not in ("", "http", "https") or parts.path.strip("/"):
        raise CapturePullFailed(f"--capture-from {address!r}: write HOST:PORT, or https://HOST:PORT")
    token = (token or "").partition("\n")[0].strip()
    if not token or re.fullmatch(r"[!-~]+", token) is None:
        raise CapturePullFailed("--capture-from needs a token with the scope capture in $SPECDECODE_CAPTURE_TOKEN")
    return PullSource(host, port, token, _tls(ca_file) if ca_file or parts.scheme == "https" else None, max_bytes)


def _tls(ca_file: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise CapturePullFailed(f"CA file {ca_file}: {error}") from None
    # Workers are called by IP address, and one certificate is shared by pods whose addresses are not known when it is
    # issued. The signature of the CA is still required.
    context.check_hostname = False
    return context


def pull_segments(source: PullSource, folder: Path, log: Callable[[str], None], stopped: Callable[[], bool]) -> Pull:
    """Fetch the segments that ``folder`` lacks from all workers and store the workers' maximum age with them.

    A stopped or killed pull is repeated: whole segments are kept. If ``stopped`` returns True, the rest is left out.

    Raises:
        CapturePullFailed: The name has no address, no worker answered and nothing is stored, or a write is refused.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for partial in folder.glob(f"*{PARTIAL_SUFFIX}"):
            partial.unlink()
        pull = Pull(source, folder)
        for address in _addresses(source):
            if stopped():
                break
            try:
                pull.worker(address, stopped)
            except _WorkerFailed as error:
                pull.skipped[address] = str(error)
    except OSError as error:
        raise CapturePullFailed(f"{folder} cannot be written: {error.strerror or error}") from error
    for address, reason in pull.skipped.items():
        log(f"distill: worker {address} is skipped: {reason}")
    if not (pull.workers or stopped() or list_segments(folder)):
        reasons = "; ".join(f"{address}: {reason}" for address, reason in pull.skipped.items())
        raise CapturePullFailed(f"no worker of {source.host}:{source.port} sent captured segments ({reasons})"[:1000])
    return pull


class _WorkerFailed(Exception):
    """Failure of one worker; the message says why."""


class _SegmentGone(Exception):
    """A segment that was deleted or rewritten since the worker listed it."""


class Pull:
    """One pull into ``folder``, with its counts of segments."""

    def __init__(self, source: PullSource, folder: Path) -> None:
        self._source, self._folder = source, folder
        self.fetched = self.known = 0
        """``known`` segments were brought by an earlier pull or another worker."""
        self.over_bound = 0
        """Segments that ``max_bytes`` had no room for, the oldest."""
        self.workers = 0
        """Workers that answered."""
        self.skipped: dict[str, str] = {}
        """Reason by address of each worker from which not everything was fetched."""
        self._stored: dict[str, tuple[int, str]] = {}
        """Size and sha256 of each segment in the folder, by name."""
        self._max_age_seconds = float("inf")
        for segment in list_segments(folder):
            with segment.path.open("rb") as file:
                self._stored[segment.path.name] = (segment.size, hashlib.file_digest(file, "sha256").hexdigest())

    def worker(self, address: str, stopped: Callable[[], bool]) -> None:
        """Fetch from one worker, the newest segments first.

        Raises:
            _WorkerFailed: The worker does not answer, or sends something else.
            OSError: The disk refuses a write.
        """
        listing = self._listing(address)
        self.workers += 1
        self._max_age_seconds = min(self._max_age_seconds, listing.max_age_seconds)
        store_retention(self._folder, Retention(self._max_age_seconds, self._source.max_bytes))
        for segment in reversed(listing.segments):
            if stopped():
                return
            listed = (segment.size, segment.sha256)
            if self._stored.get(segment.name) == listed:
                self.known += 1
            elif sum(size for size, _ in (self._stored | {segment.name: listed}).values()) > self._source.max_bytes:
                self.over_bound += 1
            else:
                with contextlib.suppress(_SegmentGone):  # a later pull fetches it as it is then
                    self._fetch(address, segment)

    def _listing(self, address: str) -> SegmentListing:
        with self._get(address, Route.captures) as response:
            body = _read(response, _MAX_LISTING_BYTES + 1)
        try:
            return SegmentListing.model_validate_json(body)
        except pydantic.ValidationError as error:
            raise _WorkerFailed(f"its list of segments is invalid: {error.errors()[0]['msg']}") from None

    def _fetch(self, address: str, segment: ListedSegment) -> None:
        """Fetch a segment through a temporary file. One that was rewritten at the worker replaces the earlier one."""
        path = self._folder / segment.name
        partial = path.with_suffix(PARTIAL_SUFFIX)
        try:
            with (
                open(partial, "xb", opener=open_private) as file,
                self._get(address, f"{Route.captures}/{segment.name}") as response,
            ):
                digest, size = hashlib.sha256(), 0
                while size <= segment.size and (piece := _read(response, READ_BYTES)):
                    size += len(piece)
                    digest.update(piece)
                    file.write(piece)
            if size != segment.size or digest.hexdigest() != segment.sha256:
                raise _SegmentGone
            flush(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        self._stored[segment.name] = (size, segment.sha256)
        self.fetched += 1

    @contextlib.contextmanager
    def _get(self, address: str, path: str) -> Iterator[http.client.HTTPResponse]:
        """Connect, send a GET and yield the response with status 200.

        Raises:
            _SegmentGone: The worker answers 404 for a segment.
            _WorkerFailed: The worker does not answer, or refuses.
        """
        source = self._source
        if source.tls is None:
            connection = http.client.HTTPConnection(address, source.port, timeout=_CONNECT_SECONDS)
        else:
            connection = http.client.HTTPSConnection(address, source.port, timeout=_CONNECT_SECONDS, context=source.tls)
        with contextlib.closing(connection):
            try:
                connection.connect()
                connection.sock.settimeout(_READ_SECONDS)
                connection.request("GET", path, headers={"Authorization": f"Bearer {source.token}"})
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise _WorkerFailed(_reason(error)) from None
            if response.status == 404 and path != Route.captures:
                raise _SegmentGone
            if response.status != 200:
                message = " ".join(_read(response, 300).decode(errors="replace").split())
                raise _WorkerFailed(f"it answers {response.status} {message}")
            yield response


def _addresses(source: PullSource) -> list[str]:
    """Return all addresses of the workers, each once."""
    try:
        entries = socket.getaddrinfo(source.host, source.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CapturePullFailed(
            f"{source.host} has no address: {error.strerror or error}; is a worker ready?"
        ) from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _read(response: http.client.HTTPResponse, count: int) -> bytes:
    """Read up to ``count`` bytes."""
    try:
        return response.read(count)
    except (OSError, http.client.HTTPException) as error:
        raise _WorkerFailed(_reason(error)) from None


def _reason(error: Exception) -> str:
    return f"{getattr(error, 'strerror', None) or error or type(error).__name__}"
