"""Error objects of OpenAI's API for every error of the router."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from specdecode_router.errors import ApiError
from specdecode_router.frontend.lifecycle import Lifecycle
from specdecode_router.frontend.request_headers import REQUEST_ID_HEADER, request_id
from specdecode_router.relay.client_stream import ClientGone, RefusedByWorker

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SERVER_NAME = "specdecode-router"


def error_response(error: ApiError | RefusedByWorker) -> web.Response:
    """Return the response for an error: its status, its headers and OpenAI's error object."""
    status, body, headers = error_parts(error)
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")


def error_parts(error: ApiError | RefusedByWorker) -> tuple[int, bytes, dict[str, str]]:
    """Return status, body and headers of an error."""
    if isinstance(error, RefusedByWorker):
        return error.status, error.error.body, dict(error.error.headers)
    return error.status, msgspec.json.encode(error.body()), dict(error.headers)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert every error to an OpenAI error object, with the texts of a worker."""
    try:
        return await handler(request)
    except (ApiError, RefusedByWorker) as error:
        return error_response(error)
    except web.HTTPException as error:
        return _framework_error(request, error)
    except ClientGone:
        raise
    except (ConnectionResetError, ConnectionAbortedError):
        raise ClientGone("the client disconnected") from None
    except Exception:
        log.exception("%s %.200r failed", request.method, request.path)
        if request.writer.output_size:
            raise  # the answer has begun, so aiohttp closes the connection
        return error_response(
            ApiError(500, "the router failed on this request; its log says why", code="internal_error")
        )


def _framework_error(request: web.Request, error: web.HTTPException) -> web.Response:
    """Convert the framework's error for an unknown path (404) or method (405)."""
    message = f"{request.method} {request.path}: {error.reason}"
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return error_response(ApiError(error.status, message, kind="invalid_request_error", headers=headers))


def set_connection_headers(lifecycle: Lifecycle) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Return a signal handler that names server and request, and closes connections while the router shuts down.

    Clients then connect to another router for their next request.
    """

    async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
        # The default names the versions of Python and aiohttp.
        response.headers["Server"] = SERVER_NAME
        response.headers[REQUEST_ID_HEADER] = request_id(request)
        if not lifecycle.ready:
            response.force_close()
            response.headers["Connection"] = "close"

    return set_headers
