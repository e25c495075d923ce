"""Routes of the admin port that list and send captured segments, for a token with the scope ``capture`` only.

Files are read in one thread of the lowest priority, in pieces, so that neither memory nor requests depend on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import BinaryIO, TypeVar

from fastapi import FastAPI
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from specdecode_worker.capture.errors import SegmentNotFound
from specdecode_worker.capture.segment_listing import READ_BYTES, FinishedSegments
from specdecode_worker.contract import Route
from specdecode_worker.server.errors import Unavailable
from specdecode_worker.server.service import Service

MAX_TRANSFERS = 4
"""Segments that are sent at the same time. More are answered with 503."""
TRANSFER_SECONDS = 600.0
"""Longest time of one transfer, so that a client that does not read gives its place back."""
_LOWEST_PRIORITY = 19

Result = TypeVar("Result")
log = logging.getLogger(__name__)


def add_captures(app: FastAPI, service: Service) -> None:
    """Add the routes to ``app``. Without capture every segment is unknown."""
    source = _SegmentSource(service)

    @app.get(Route.captures)
    async def list_captures() -> Response:
        return Response(await source.listing(), media_type="application/json")

    @app.get(f"{Route.captures}/{{name}}")
    async def send_capture(name: str) -> Response:
        return await source.transfer(name)


class _SegmentSource:
    """Finished segments of one worker, read without blocking the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._segments: FinishedSegments | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._transfers = 0

    async def listing(self) -> bytes:
        """Return the JSON document of the listing."""
        segments = self._finished_segments()
        return await self.read(lambda: segments.listing().model_dump_json().encode())

    async def transfer(self, name: str) -> Response:
        """Return the response that sends one segment.

        Raises:
            Unavailable: Too many segments are being sent.
            HTTPException: There is no such segment (404).
        """
        segments = self._finished_segments()
        if self._transfers >= MAX_TRANSFERS:
            raise Unavailable(f"{MAX_TRANSFERS} segments are being sent; try again later", code="too_many_transfers")
        self._transfers += 1
        try:
            file = await self.read(lambda: segments.open(name))
        except BaseException as error:
            self._transfers -= 1
            if isinstance(error, SegmentNotFound):
                raise HTTPException(404, str(error)) from None
            raise
        return _SegmentResponse(file, self)

    async def read(self, function: Callable[[], Result]) -> Result:
        """Call a blocking function in the thread of this source."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "captured-segments", initializer=_lower_priority)
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def end_transfer(self) -> None:
        """Give the place of a transfer back."""
        self._transfers -= 1

    def _finished_segments(self) -> FinishedSegments:
        """Return the segments, with the bounds that are in force. Raise HTTPException (404) while capture is off."""
        recorder = self._service.recorder
        retention = recorder.retention if recorder is not None else None
        if recorder is None or retention is None:
            self._segments = None
            raise HTTPException(404, "this worker does not capture traffic")
        if self._segments is None:
            shared = self._service.config.capture is not None  # other workers may write to that folder
            self._segments = FinishedSegments(recorder.folder, retention, None if shared else recorder)
        self._segments.retention = retention
        return self._segments


class _SegmentDeleted(Exception):
    """A segment that was deleted or rewritten while it was sent."""


class _SegmentResponse(StreamingResponse):
    """Response that sends an open segment and closes it, also if the client disconnects or does not read."""

    def __init__(self, file: BinaryIO, source: _SegmentSource) -> None:
        self._file, self._source = file, source
        self._size = os.fstat(file.fileno()).st_size
        super().__init__(
            self._pieces(), media_type="application/octet-stream", headers={"Content-Length": str(self._size)}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the segment within TRANSFER_SECONDS. A transfer that is cut is shorter than its Content-Length."""
        try:
            async with asyncio.timeout(TRANSFER_SECONDS):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            log.warning("a client did not read a captured segment within %.0f s", TRANSFER_SECONDS)
        except _SegmentDeleted:
            log.info("a captured segment was deleted while it was sent; the rest of it is not sent")
        finally:
            self._file.close()
            self._source.end_transfer()

    async def _pieces(self) -> AsyncIterator[bytes]:
        left = self._size
        while left > 0:
            piece = await self._source.read(partial(self._next_piece, min(READ_BYTES, left)))
            if not piece:
                return
            left -= len(piece)
            yield piece

    def _next_piece(self, size: int) -> bytes:
        """Read from the segment. Raise _SegmentDeleted if it was deleted or rewritten meanwhile."""
        if not os.fstat(self._file.fileno()).st_nlink:
            raise _SegmentDeleted
        return self._file.read(size)


def _lower_priority() -> None:
    """Give this thread the lowest priority, where the system allows it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
