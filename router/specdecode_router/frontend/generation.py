"""Generation routes: completions and chat completions, relayed over internal streams."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
from aiohttp import web

from specdecode_router.errors import ApiError
from specdecode_router.frontend.bodies import read_body
from specdecode_router.frontend.client_response import ClientResponse
from specdecode_router.frontend.request_headers import (
    CAPTURE_HEADER,
    TASK_HEADER,
    request_id,
    timeout_seconds,
    trace_headers,
)
from specdecode_router.frontend.state import RouterState
from specdecode_router.relay.client_stream import ClientGone, RefusedByWorker
from specdecode_router.relay.relay import Relay
from specdecode_router.relay.worker_choice import WorkerChoice
from specdecode_worker.contract.internal_stream import OpenStream

GENERATION_ROUTES = ("/v1/chat/completions", "/v1/completions")


def add_generation(app: web.Application, state: RouterState) -> None:
    """Add the generation routes."""

    async def generate(request: web.Request) -> web.StreamResponse:
        with state.lifecycle.request():
            return await _generate(request, state)

    for route in GENERATION_ROUTES:
        app.router.add_post(route, generate)


async def _generate(request: web.Request, state: RouterState) -> web.StreamResponse:
    settings = state.settings
    tenant = state.tenants.authenticate(request.headers.get("Authorization", ""))
    deadline = state.clock() + timeout_seconds(request.headers, settings.request_timeout_seconds)
    body = await read_body(request, state.bodies, settings.max_body_bytes, settings.body_timeout_seconds)
    fields = _fields(body)
    stream = OpenStream(
        route=request.path,
        body=body,
        request_id=request_id(request.headers),
        task=request.headers.get(TASK_HEADER),
        capture=request.headers.get(CAPTURE_HEADER),
        tenant=tenant.name,
        priority=max(_priority(fields), tenant.priority),
        cache_salt=tenant.name,
    )
    choice = WorkerChoice(state.prefixes, request.path, fields, tenant=tenant.name, task=stream.task)
    response = ClientResponse(
        request,
        stream.request_id,
        max_unsent_bytes=settings.max_unsent_bytes,
        write_seconds=settings.write_timeout_seconds,
    )
    try:
        left = deadline - state.clock()
        with await state.admission.acquire(tenant, stream.priority, left):
            relay = Relay(state.relay, stream, response, choice, deadline, trace_headers(request.headers))
            await relay.run()
    except (ApiError, RefusedByWorker) as error:
        with contextlib.suppress(ClientGone):
            await response.fail(error)
    except ClientGone:
        return _gone(response)
    assert response.response is not None
    return response.response


def _gone(response: ClientResponse) -> web.StreamResponse:
    """Return a response for a client that will not read it."""
    return response.response or web.Response(status=499)


def _fields(body: bytes) -> dict[str, Any]:
    """Return the body as an object; empty if it is none, which a worker will refuse by the right message."""
    try:
        fields = msgspec.json.decode(body)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _priority(fields: dict[str, Any]) -> int:
    priority = fields.get("priority", 0)
    return priority if isinstance(priority, int) and -(2**31) <= priority < 2**31 else 0
