"""Public routes that a worker answers as a whole: models, version, OpenAPI document, tokenization, and by 501."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp
from aiohttp import web

from specdecode_router.errors import ApiError
from specdecode_router.frontend.bodies import read_body
from specdecode_router.frontend.client_response import ClientResponse
from specdecode_router.frontend.request_headers import trace_headers
from specdecode_router.frontend.state import RouterState
from specdecode_router.relay.client_stream import ClientGone
from specdecode_router.relay.worker_choice import WorkerChoice
from specdecode_worker.http_edge import BodyBudget, BodyReservation

_OPEN_PATHS = frozenset({"/version", "/openapi.json"})
"""Paths that need no API key, as at a worker."""
_FORWARD_SECONDS = 30.0
_MAX_ATTEMPTS = 3
_MAX_AT_ONCE = 64
"""Requests that this router forwards at a time. A worker's admin port has 256 connections besides streams, for the
forwarded requests and the load polls of all routers."""
_PASSED_HEADERS = ("Content-Type", "Retry-After", "WWW-Authenticate", "Allow", "X-Should-Retry",
                   "X-Specdecode-Ignored")  # fmt: skip
"""Headers of an answer that the client gets; the others concern the connection."""
_FAILED_STATUSES = frozenset({502, 503})
"""Answers after which another worker is asked."""


def add_forwarding(app: web.Application, state: RouterState) -> None:
    """Add the routes that are forwarded to a worker."""
    models: dict[str, Any] = {}
    """Last answers of the routes of models by path, for the time without workers."""
    settings, places = state.settings, asyncio.Semaphore(_MAX_AT_ONCE)
    budget = BodyBudget(settings.max_unfinished_body_bytes)
    """Bytes of the bodies of all forwarded requests, until their clients have read the answers."""

    async def forward(request: web.Request) -> web.StreamResponse:
        if request.path not in _OPEN_PATHS:
            state.tenants.authenticate(request.headers.get("Authorization", ""))
        with state.lifecycle.request(), BodyReservation(budget) as reservation:
            body = await read_body(request, reservation, settings.max_body_bytes, settings.body_timeout_seconds)
            async with places:
                answer = await _forward(request, state, models, body)
            client = ClientResponse(request, settings)
            with contextlib.suppress(ClientGone):
                await client.send(answer)
            return answer

    for path in ("/version", "/openapi.json", "/v1/models", "/v1/models/{name:.+}"):
        app.router.add_get(path, forward, allow_head=False)
    for path in ("/tokenize", "/detokenize", "/v1/responses", "/v1/embeddings"):
        app.router.add_post(path, forward)


async def _forward(request: web.Request, state: RouterState, models: dict[str, Any], body: bytes) -> web.Response:
    """Ask one worker after the other until one answers."""
    headers = trace_headers(request.headers)
    if "Content-Type" in request.headers:
        headers["Content-Type"] = request.headers["Content-Type"]
    # Bodies are spread over the workers; no prefix cache serves these routes.
    fields = {"prompt": str(hash(body))}
    choice = WorkerChoice(state.placement, state.relay.metrics, request.path, fields, tenant="", task=None)
    tried: set[str] = set()
    answer: web.Response | None = None
    while len(tried) < _MAX_ATTEMPTS and (view := choice.choose(state.relay.workers.views(), "", frozenset(tried))):
        tried.add(view.endpoint.name)
        try:
            answer = await _ask(request, state, view.endpoint.admin_url, body, headers)
        except (aiohttp.ClientError, OSError, TimeoutError):
            state.relay.workers.record_failure(view.endpoint.name)
            continue
        if answer.status not in _FAILED_STATUSES:
            if answer.status == 200 and request.path.startswith("/v1/models"):
                models[request.path] = answer.body
            return answer
    if answer is not None:
        return answer
    if request.path in models:
        return web.Response(body=models[request.path], content_type="application/json")
    raise ApiError(503, "no worker can serve this request now; try again later", code="no_worker",
                   headers={"Retry-After": "1"})  # fmt: skip


async def _ask(
    request: web.Request, state: RouterState, admin_url: str, body: bytes, headers: dict[str, str]
) -> web.Response:
    response = await state.relay.client.forward(
        admin_url, request.method, request.rel_url.raw_path_qs, body, headers, _FORWARD_SECONDS
    )
    async with response:
        content = await response.read()
        passed = {name: response.headers[name] for name in _PASSED_HEADERS if name in response.headers}
        return web.Response(status=response.status, body=content, headers=passed)
