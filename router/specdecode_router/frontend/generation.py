"""Generation routes: completions and chat completions, relayed over internal streams."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from specdecode_router.errors import ApiError
from specdecode_router.frontend.bodies import read_body
from specdecode_router.frontend.client_response import ClientResponse
from specdecode_router.frontend.request_headers import (
    CAPTURE_HEADER,
    REQUEST_ID,
    TASK_HEADER,
    request_id,
    text_of,
    timeout_seconds,
    trace_headers,
)
from specdecode_router.frontend.state import RouterState
from specdecode_router.frontend.stream_resumption import NumberedRequest, numbered_request
from specdecode_router.queueing.refusals import Refused
from specdecode_router.queueing.tenants import Tenant
from specdecode_router.relay.client_stream import ClientGone, RefusedByWorker
from specdecode_router.relay.relay import Relay
from specdecode_router.relay.worker_choice import WorkerChoice
from specdecode_router.telemetry.metrics import Stage
from specdecode_worker.contract.internal_stream import OpenStream
from specdecode_worker.http_edge import BodyReservation

GENERATION_ROUTES = ("/v1/chat/completions", "/v1/completions")
_BYTES_PER_TOKEN = 4
"""Bytes of a body for one token of its prompt, for what a request is expected to cost."""
CLIENT_CLOSED_REQUEST = 499
"""Status for the metrics of a client that left before its answer was complete."""


def add_generation(app: web.Application, state: RouterState) -> None:
    """Add the generation routes."""
    for route in GENERATION_ROUTES:
        app.router.add_post(route, partial(_generate, state))


async def _generate(state: RouterState, request: web.Request) -> web.StreamResponse:
    metrics, settings = state.relay.metrics, state.settings
    response = ClientResponse(request, settings)
    tenant, choice, status = Tenant(""), None, CLIENT_CLOSED_REQUEST
    with contextlib.ExitStack() as running:
        try:
            running.enter_context(state.lifecycle.request())
            tenant = state.tenants.authenticate(request.headers.get("Authorization", ""))
            deadline = state.clock() + timeout_seconds(request.headers, settings.request_timeout_seconds)
            with BodyReservation(state.bodies) as arriving:
                body = await read_body(request, arriving, settings.max_body_bytes, settings.body_timeout_seconds)
            received = state.clock()
            stream, choice, numbered = _understand(request, body, tenant, state)
            now = state.clock()
            metrics.observe_added_latency(Stage.receive, now - received)
            prompt_tokens = len(body) // _BYTES_PER_TOKEN
            with await state.admission.acquire(tenant, deadline - now, prompt_tokens, len(body)) as place:
                metrics.observe_queue_time(place.waited_seconds)
                with metrics.running_request():
                    client = response if numbered is None else numbered.client_stream(response)
                    relay = Relay(state.relay, stream, client, choice, deadline, trace_headers(request.headers))
                    try:
                        await relay.run()
                    finally:
                        place.prompt_tokens, place.output_tokens = relay.tokens
            status = 200
        except (ApiError, RefusedByWorker) as error:
            status = await _fail(response, error, state)
        except (ClientGone, ConnectionError):
            pass
        except Exception:
            status = 500
            raise
        finally:
            metrics.count_request(tenant.name, status, "" if choice is None else choice.deployment)
    return response.response or web.Response(status=status)


async def _fail(response: ClientResponse, error: ApiError | RefusedByWorker, state: RouterState) -> int:
    """Send an error to the client. Return its status."""
    if isinstance(error, Refused):
        state.relay.metrics.count_refusal(error.reason)
    try:
        await response.fail(error)
    except ClientGone:
        return CLIENT_CLOSED_REQUEST
    return error.status


def _understand(
    request: web.Request, body: bytes, tenant: Tenant, state: RouterState
) -> tuple[OpenStream, WorkerChoice, NumberedRequest | None]:
    """Return the request for a worker, the choice of the worker, and what the client wants of the ids of events."""
    fields = _fields(body)
    stream = OpenStream(
        route=request.path,
        body=body,
        request_id=request_id(request),
        task=text_of(request.headers, TASK_HEADER),
        capture=text_of(request.headers, CAPTURE_HEADER),
        tenant=tenant.name,
        weight=tenant.weight,
        cache_salt=tenant.name,
    )
    numbered = numbered_request(request.headers, request.path, fields, tenant=tenant.name,
                                request_id=stream.request_id, created=int(time.time()))  # fmt: skip
    choice = WorkerChoice(
        state.placement, state.relay.metrics, request.path, fields, tenant=tenant.name, task=stream.task
    )
    if numbered is not None:
        stream = numbered.open_stream(stream)
        request[REQUEST_ID] = stream.request_id
    return stream, choice, numbered


def _fields(body: bytes) -> dict[str, Any]:
    """Return the body as an object; empty if it is none, which a worker will refuse by the right message."""
    try:
        fields = msgspec.json.decode(body)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
