"""What both ports share: bodies of bounded size, errors as OpenAI's object, connections that close on the way out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdecode_worker.server.errors import ApiError, BodyTooLarge, EngineFailed
from specdecode_worker.server.lifecycle import Lifecycle

MAX_BODY_BYTES = 4 * 1024 * 1024
# A client that is still sending cannot read the answer; so much of a body too large is read and thrown away.
_DISCARD_BYTES = 16 * MAX_BODY_BYTES

Result = TypeVar("Result")


class ClientGone(Exception):
    """Nobody is left to answer."""


async def read_body(request: Request) -> bytes:
    """Raises BodyTooLarge beyond MAX_BODY_BYTES."""
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MAX_BODY_BYTES:
            body += chunk
        elif size > _DISCARD_BYTES:
            break
    if size > MAX_BODY_BYTES:
        raise BodyTooLarge(f"the body has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of ``work``; it is cancelled and ClientGone raised when the client hangs up first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ApiError):
                await task


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def answer_errors(app: FastAPI) -> None:
    """Makes every error of ``app`` an OpenAI error object."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _bug)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), status_code=error.status, headers=dict(error.headers))


async def _http_error(request: Request, error: Exception) -> Response:
    """A path that does not exist, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _bug(request: Request, error: Exception) -> Response:
    # The server in front of the application logs it, with its traceback.
    failed = EngineFailed("the server failed on this request; its log says why", code="internal_error")
    return JSONResponse(failed.body(), status_code=failed.status)


class CloseWhenLeaving:
    """Asks clients to reconnect elsewhere once this worker is on its way out."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._lifecycle.leaving:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_closing)
