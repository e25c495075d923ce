"""Internal routes of the admin port, for routers: streams, and the public routes that generate no text."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from specdecode_worker.contract.internal_stream import INTERNAL_STREAMS, MAX_FRAME_BYTES, decode_request
from specdecode_worker.server.errors import BadRequest
from specdecode_worker.server.routes.http_app import answer_errors, read_body
from specdecode_worker.server.routes.information import add_information
from specdecode_worker.server.routes.tokenization import add_tokenization
from specdecode_worker.server.service import Service
from specdecode_worker.server.streams.frame_stream import FrameStream

INTERNAL_PUBLIC = "/internal/v1/public"
"""Prefix of the public routes that generate no text."""


def add_internal(app: FastAPI, service: Service) -> None:
    """Add the internal routes."""

    @app.post(INTERNAL_STREAMS)
    async def streams(request: Request) -> Response:
        try:
            opened = decode_request(await read_body(request, MAX_FRAME_BYTES))
        except ValueError as error:
            raise BadRequest(str(error)) from None
        return FrameStream(service, opened)

    app.mount(INTERNAL_PUBLIC, _WithoutPrefix(_public_without_generation(service)))


class _WithoutPrefix:
    """ASGI application that hides the prefix from another one, so that its answers are those of the public port."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        path = scope["path"].removeprefix(INTERNAL_PUBLIC)
        await self._app({**scope, "path": path, "raw_path": path.encode(), "root_path": ""}, receive, send)


def _public_without_generation(service: Service) -> FastAPI:
    app = FastAPI(title="specdecode", openapi_url=None)
    answer_errors(app)
    add_information(app, service)
    add_tokenization(app, service)
    return app
