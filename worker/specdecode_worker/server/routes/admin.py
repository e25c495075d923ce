"""Routes of the admin port: plans, drafts, reports, captures and their deletion."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import BinaryIO, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Scope as AsgiScope

from specdecode_worker.capture.recorder import FinishedSegments
from specdecode_worker.capture.records import FolderUnusable, SegmentNotFound
from specdecode_worker.capture.segments import READ_BYTES
from specdecode_worker.contract import MAX_REPORT_BYTES, Header, Plan, Report, Route, SyntheticKnobs
from specdecode_worker.server.admission import (
    ReloadedSecrets,
    allowed_scopes,
    bearer_token,
    scope_of,
)
from specdecode_worker.server.errors import ApiError, Forbidden, Unauthorized, Unavailable
from specdecode_worker.server.listening import GracefulShutdown, answer_errors, error_response, read_body
from specdecode_worker.server.requests import NewDraft, UserDeletion, parse_contract
from specdecode_worker.server.routes.internal import add_internal
from specdecode_worker.server.service import Service

log = logging.getLogger(__name__)

# Access check of the admin port: a token with the scope of the route.


class AdminAccessCheck:
    """ASGI middleware that answers 401 or 403 to a request that may not call its route of the admin port.

    It runs before routing, so that a client without a token cannot tell which paths exist.
    """

    def __init__(self, app: ASGIApp, tokens: ReloadedSecrets) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Handle one request of the ASGI server."""
        if scope["type"] == "http":
            try:
                self._check(scope["method"], scope["path"], Headers(scope=scope))
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        """Raise Unauthorized or Forbidden for a request that may not call its route."""
        token = bearer_token(headers.get("Authorization", ""))
        scopes = {scope_of(name) for name in self._tokens.current.names_of(token)} if token is not None else set()
        if not scopes:
            raise Unauthorized(
                "the admin port needs 'Authorization: Bearer <token>'; the worker's log names the file of a token that "
                "was made at start"
            )
        allowed = allowed_scopes(method, path)
        if not scopes & allowed:
            needed, had = " or ".join(sorted(allowed)), " and ".join(sorted(scopes))
            log.warning("refused %s %.200r: the token has the scope %s, the route needs %s", method, path, had, needed)
            raise Forbidden(f"this route needs a token with the scope {needed}; this token has {had}")


# Routes of the admin port that list and send captured segments, for a token with the scope ``capture`` only.
#
# Files are read in one thread of the lowest priority, in pieces, so that neither memory nor requests depend on them.

MAX_TRANSFERS = 4
"""Segments that are sent at the same time. More are answered with 503."""
TRANSFER_SECONDS = 600.0
"""Longest time of one transfer, so that a client that does not read gives its place back."""
_LOWEST_PRIORITY = 19

Result = TypeVar("Result")


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
        self._thread = ThreadPoolExecutor(1, "captured-segments", initializer=_lower_priority)
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


# Route of the admin port that deletes the captured requests of a user, for a token with the scope operator.
#
# The user is in the body, so that no access log has it.


def add_capture_deletions(app: FastAPI, service: Service) -> None:
    """Add the route to ``app``. Deletions run one after the other, in a thread of their own."""
    thread = ThreadPoolExecutor(1, "capture-deletions")

    @app.post(Route.capture_deletions)
    async def delete_captures(request: Request) -> Response:
        user = parse_contract(UserDeletion, await read_body(request)).user
        if service.recorder is None:
            raise HTTPException(404, "this worker does not capture traffic")
        service.check_loaded()
        capture = service.capture
        assert capture is not None, "a loaded worker with a recorder captures requests"
        try:
            counts = await asyncio.get_running_loop().run_in_executor(thread, partial(capture.delete_user, user))
        except FolderUnusable as error:
            raise Unavailable(str(error), code="capture_folder") from None
        return JSONResponse(asdict(counts))


# Routes of the admin port, which the operator calls with a token of the scope that `AdminAccessCheck` asks for.


def admin_app(service: Service, shutdown: GracefulShutdown, tokens: ReloadedSecrets) -> FastAPI:
    """Build the application of the admin port. A request needs one of ``tokens``."""
    app = FastAPI(title="specdecode admin", openapi_url=None)
    app.add_middleware(AdminAccessCheck, tokens=tokens)
    answer_errors(app)
    _add_plan(app, service)
    _add_draft(app, service)
    _add_synthetic(app, service)
    add_internal(app, service)
    add_capture_deletions(app, service)
    add_captures(app, service)

    @app.get(Route.report)
    async def report(request: Request) -> Response:
        return _report_or_not_modified(await service.report(), request.headers.get("If-None-Match"))

    @app.post(Route.drain)
    async def drain() -> Response:
        shutdown.begin()
        return JSONResponse({"state": service.lifecycle.state.name.lower()}, status_code=202)

    return app


def _add_plan(app: FastAPI, service: Service) -> None:
    @app.get(Route.plan)
    async def get_plan() -> Response:
        return _json(service.plans.current.model_dump_json().encode())

    @app.put(Route.plan)
    async def put_plan(request: Request) -> Response:
        plan = parse_contract(Plan, await read_body(request))
        await service.set_plan(plan)
        return _json(plan.model_dump_json().encode())


def _add_draft(app: FastAPI, service: Service) -> None:
    @app.get(Route.draft)
    async def get_draft() -> Response:
        report = await service.report()
        named = [draft.model_dump() for draft in report.named_drafts]
        return JSONResponse({"draft": report.draft.model_dump(), "named_drafts": named})

    @app.put(Route.draft)
    async def put_draft(request: Request) -> Response:
        new = parse_contract(NewDraft, await read_body(request))
        expected = await service.begin_draft_swap(new.config(), new.name, new.expected_hash)
        body = {**new.model_dump(exclude={"expected_hash"}), "hash": expected, "status": Route.draft}
        return JSONResponse(body, status_code=202, headers={"Location": Route.draft})


def _add_synthetic(app: FastAPI, service: Service) -> None:
    @app.get(Route.synthetic)
    async def get_synthetic() -> Response:
        knobs = (await service.report()).synthetic
        return _json(b"null" if knobs is None else knobs.model_dump_json().encode())

    @app.put(Route.synthetic)
    async def put_synthetic(request: Request) -> Response:
        knobs = parse_contract(SyntheticKnobs, await read_body(request))
        await service.set_synthetic(knobs)
        return _json(knobs.model_dump_json().encode())

    @app.delete(Route.synthetic)
    async def delete_synthetic() -> Response:
        await service.set_synthetic(None)
        return Response(status_code=204)


def _report_or_not_modified(report: Report, known: str | None) -> Response:
    """Return the report, or 304 with only the clock if the client already has this report.

    The entity tag covers the whole report except its clock.

    Args:
        report: The current report.
        known: Value of the header If-None-Match.
    """
    still = report.model_copy(update={"clock_seconds": 0.0}).model_dump_json().encode()
    tag = f'"{hashlib.sha256(still).hexdigest()[:16]}"'
    if tag == known:
        return Response(status_code=304, headers={"ETag": tag, Header.clock_seconds: repr(report.clock_seconds)})
    body = report.model_dump_json().encode()
    assert len(body) <= MAX_REPORT_BYTES, f"a report of {len(body)} bytes breaks the contract"
    return Response(body, media_type="application/json", headers={"ETag": tag})


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
