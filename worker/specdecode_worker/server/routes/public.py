"""Application of the public port, with the completion and chat completion routes of OpenAI's API."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import Response

from specdecode_worker.http_edge.body_budget import BodyBudget
from specdecode_worker.server.access.reloaded_secrets import ReloadedSecrets
from specdecode_worker.server.errors import BadRequest
from specdecode_worker.server.request_capture import CAPTURE_HEADER
from specdecode_worker.server.request_terms import terms_of
from specdecode_worker.server.routes.api_keys import ApiKeyCheck, client_name
from specdecode_worker.server.routes.http_app import (
    CloseConnectionsOnShutdown,
    answer_errors,
    cancel_on_disconnect,
    read_body,
)
from specdecode_worker.server.routes.information import add_information
from specdecode_worker.server.routes.tokenization import add_tokenization
from specdecode_worker.server.service import Service
from specdecode_worker.server.streaming import EventStream, close
from specdecode_worker.server.streams.preparation import START, Call, StartedRequest, start

TASK_HEADER = "X-Specdecode-Task"
REQUEST_ID_HEADER = "X-Request-Id"
LAST_EVENT_ID_HEADER = "Last-Event-ID"
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def public_app(service: Service, api_keys: ReloadedSecrets | None = None) -> FastAPI:
    """Build the application of the public port. With ``api_keys`` a request needs one of them."""
    app = FastAPI(title="specdecode", openapi_url=None)
    app.state.body_budget = BodyBudget(service.config.server.max_unfinished_body_bytes)
    app.add_middleware(ApiKeyCheck, keys=api_keys)
    app.add_middleware(CloseConnectionsOnShutdown, lifecycle=service.lifecycle)
    answer_errors(app)
    add_information(app, service)
    add_tokenization(app, service)

    for route in START:
        _add_generation(app, service, route)
    return app


def _add_generation(app: FastAPI, service: Service, route: str) -> None:
    @app.post(route)
    async def generate(request: Request) -> Response:
        service.lifecycle.check_accepting()
        _check_no_event_id(request)
        terms = terms_of(client_name(request), request.headers, service.config.server, time.monotonic())
        call = Call(
            body=await read_body(request),
            request_id=_request_id(request),
            created=int(time.time()),
            task=request.headers.get(TASK_HEADER),
            capture=request.headers.get(CAPTURE_HEADER),
            terms=terms,
        )
        return await _answer(request, await start(service, route, call, partial(cancel_on_disconnect, request)))


def _request_id(request: Request) -> str:
    """Return the id of the request: that of the client, if it is valid in a header."""
    sent = request.headers.get(REQUEST_ID_HEADER, "")
    return sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex


def _check_no_event_id(request: Request) -> None:
    """Refuse a client that wants the rest of a stream: it would get the beginning again.

    Raises:
        BadRequest: The request has the header Last-Event-ID.
    """
    if request.headers.get(LAST_EVENT_ID_HEADER):
        raise BadRequest(
            "a worker sends no rest of a stream: send the request to a router, or again without Last-Event-ID",
            param=LAST_EVENT_ID_HEADER,
            code="unsupported_header",
        )


async def _answer(request: Request, started: StartedRequest) -> Response:
    """Return the response, streaming or complete. The generations are closed in every case."""
    headers = {REQUEST_ID_HEADER: started.writer.request_id}
    generations = started.generations
    if started.body.stream:
        return EventStream(generations, started.writer, started.stream_options, headers)
    try:
        choices = await cancel_on_disconnect(
            request, asyncio.gather(*(generation.whole() for generation in generations))
        )
        content = await started.encode_whole(choices)
        return Response(content, headers=headers, media_type="application/json")
    finally:
        close(generations)
