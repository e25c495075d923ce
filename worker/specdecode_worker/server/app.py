"""HTTP functions common to both ports: bounded bodies, OpenAI error objects, connection close at shutdown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdecode_worker.http_edge import BodyBudget, BodyReservation
from specdecode_worker.server.errors import ApiError, BodyTooLarge, EngineFailed, Unavailable
from specdecode_worker.server.lifecycle import Lifecycle

MAX_BODY_BYTES = 4 * 1024 * 1024
# A client that is still sending cannot read the response, so up to this much of an oversized body is read and dropped.
_DISCARD_BYTES = 16 * MAX_BODY_BYTES

Result = TypeVar("Result")


class ClientGone(Exception):
    """Error for a client that disconnected before its response was ready."""


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Read the request body. Until it is whole, its bytes count in the ``body_budget`` of the application's state.

    Args:
        request: The request.
        max_bytes: Largest size of the body.

    Raises:
        BodyTooLarge: The body exceeds ``max_bytes``.
        Unavailable: The bodies of all clients together exceed the budget.
        ClientGone: The client disconnected before its body was whole.
    """
    body, size = bytearray(), 0
    with BodyReservation(getattr(request.app.state, "body_budget", BodyBudget())) as reservation:
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size <= max_bytes and reservation.grow(len(chunk)):
                    body += chunk
                elif size > max(max_bytes, _DISCARD_BYTES):
                    break
                else:
                    body.clear()
                    reservation.release()
        except ClientDisconnect:
            raise ClientGone from None
    if size > max_bytes:
        raise BodyTooLarge(f"the body has more than {max_bytes} bytes")
    if reservation.exceeded:
        raise Unavailable("too many request bodies are arriving at once; try again later", code="too_many_bodies")
    return bytes(body)


async def cancel_on_disconnect(request: Request, work: Awaitable[Result]) -> Result:
    """Return the result of ``work``, or cancel it and raise ClientGone if the client disconnects first."""
    working = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((working, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, disconnected):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ApiError):
                await task


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def error_response(error: ApiError) -> Response:
    """Return the response for an error: its status, its headers and OpenAI's error object."""
    return JSONResponse(error.body(), status_code=error.status, headers=dict(error.headers))


def answer_errors(app: FastAPI) -> None:
    """Install the handlers that convert every error of ``app`` to an OpenAI error object."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _internal_error)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Convert the framework's error for an unknown path (404) or method (405)."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.scope['path']}: {error.detail}"
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # not sent: the client has disconnected


async def _internal_error(request: Request, error: Exception) -> Response:
    # Uvicorn logs the exception with its traceback.
    failed = EngineFailed("the server failed on this request; its log says why", code="internal_error")
    return error_response(failed)


class CloseConnectionsOnShutdown:
    """ASGI middleware that adds ``Connection: close`` during shutdown, so that clients reconnect to another worker."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection of the ASGI server."""

        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._lifecycle.shutting_down:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_closing)
