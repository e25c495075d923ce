"""Routes of the public port: completions, chat, tokenization and information."""

from __future__ import annotations

import asyncio
import time
from functools import cache

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specdecode_worker import metrics
from specdecode_worker.http_edge import BodyBudget
from specdecode_worker.server.admission import ModelLimits, ReloadedSecrets, bearer_token, terms_of
from specdecode_worker.server.errors import BadRequest, NotBuilt, Unauthorized, without_paths
from specdecode_worker.server.listening import (
    ResponseHeaders,
    answer_errors,
    cancel_on_disconnect,
    error_response,
    read_body,
)
from specdecode_worker.server.openapi import document
from specdecode_worker.server.request_capture import CAPTURE_HEADER
from specdecode_worker.server.requests import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    build,
    ignored_header,
    parse,
    read_object,
)
from specdecode_worker.server.service import (
    GENERATION_ROUTES,
    Call,
    EventStream,
    Service,
    SharedCall,
    StartedRequest,
    start,
)
from specdecode_worker.version import VERSION

# Informational routes of the public port: probes, metrics, models, version and OpenAPI document.


def information_app(service: Service) -> FastAPI:
    """Build an application with the public routes that generate no text."""
    app = FastAPI(title="specdecode", openapi_url=None)
    answer_errors(app)
    _add_information(app, service)
    _add_tokenization(app, service)
    return app


def _add_information(app: FastAPI, service: Service) -> None:
    """Add the routes for probes, metrics, models, version and OpenAPI document, and those that answer 501."""
    _add_probes(app, service)
    _add_not_built(app)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": VERSION})

    @cache
    def encode_document(limits: ModelLimits | None) -> bytes:
        return msgspec.json.encode(document(service.config.model.served_name, limits))

    async def openapi_json() -> bytes:
        return encode_document(service.limits)

    # The document is cached. It is shared nevertheless, so that clients in a tight loop are slowed down.
    openapi_call = SharedCall(openapi_json)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(await openapi_call.result(), media_type="application/json")

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model_card(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model_name(name)
        return JSONResponse(_model_card(service))


NOT_BUILT = {
    "/v1/responses": "the Responses API is not built; send the conversation to v1/chat/completions",
    "/v1/embeddings": "this server generates text and computes no embeddings; use a server of an embedding model",
}
"""Routes of OpenAI's API that are answered by 501, with the reason."""


def _add_not_built(app: FastAPI) -> None:
    def add(path: str, reason: str) -> None:
        @app.post(path)
        async def refuse() -> Response:
            raise NotBuilt(reason)

    for path, reason in NOT_BUILT.items():
        add(path, reason)


def _add_probes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        lifecycle = service.lifecycle
        return PlainTextResponse(
            without_paths(lifecycle.failure) or "ok\n", status_code=200 if lifecycle.healthy else 503
        )

    @app.get("/ready")
    async def ready() -> Response:
        lifecycle = service.lifecycle
        return PlainTextResponse(f"{lifecycle.readiness}\n", status_code=200 if lifecycle.ready else 503)

    async def render_metrics() -> bytes:
        return metrics.render(await service.report(), service.counts, vllm_names=service.config.server.vllm_metrics)

    rendering = SharedCall(render_metrics)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(await rendering.result(), media_type=metrics.CONTENT_TYPE)


def _model_card(service: Service) -> dict[str, object]:
    name = service.config.model.served_name
    return {
        "id": name,
        "object": "model",
        "created": service.started_seconds,
        "owned_by": "specdecode",
        "max_model_len": service.model.loaded.max_model_len,
    }


# Routes /tokenize and /detokenize, with the fields of vLLM.


def _add_tokenization(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        fields = read_object(await read_body(request))
        body: TokenizeRequest | TokenizeChatRequest
        body = build(TokenizeChatRequest, fields) if "messages" in fields else build(TokenizeRequest, fields)
        service.check_model_name(body.model)
        vocabulary = service.model.tokenizer.vocabulary
        ids = await cancel_on_disconnect(request, service.prompts.tokenize(body))
        pieces = [vocabulary.piece_of(token) for token in ids] if body.return_token_strs else None
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": service.model.loaded.max_model_len,
                "tokens": ids,
                "token_strs": pieces,
            },
            headers=ignored_header(body.ignored_fields),
        )

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = parse(DetokenizeRequest, await read_body(request))
        service.check_model_name(body.model)
        text = await cancel_on_disconnect(request, service.prompts.detokenize(body.tokens))
        return JSONResponse({"prompt": text}, headers=ignored_header(body.ignored_fields))


# API key check of the public port. Probes and metrics need no key, as in vLLM.

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/openapi.json"})


class ApiKeyCheck:
    """ASGI middleware that answers 401 to a request without a valid API key, and sets ``request.state.client_name``.

    It runs before routing, so that a client without a key cannot tell which paths exist. It decides by the path that
    is routed; ``request.url`` would depend on the header ``Host``.
    """

    def __init__(self, app: ASGIApp, keys: ReloadedSecrets | None) -> None:
        """Wrap ``app``. Without ``keys`` every request is accepted, with an empty client name."""
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request of the ASGI server."""
        if scope["type"] == "http":
            scope.setdefault("state", {})["client_name"] = ""
            if self._keys is not None and scope["path"] not in OPEN_PATHS:
                token = bearer_token(Headers(scope=scope).get("Authorization", ""))
                names = self._keys.current.names_of(token) if token is not None else ()
                if not names:
                    error = Unauthorized(
                        "send a valid API key as 'Authorization: Bearer <key>'", code="invalid_api_key"
                    )
                    await error_response(error)(scope, receive, send)
                    return
                # A file may hold an old and a new key of one client; those after the first are named FILE/2 and so on.
                scope["state"]["client_name"] = names[0].partition("/")[0]
        await self._app(scope, receive, send)


# Application of the public port, with the completion and chat completion routes of OpenAI's API.

TASK_HEADER = "X-Specdecode-Task"
LAST_EVENT_ID_HEADER = "Last-Event-ID"


def public_app(service: Service, api_keys: ReloadedSecrets | None = None) -> FastAPI:
    """Build the application of the public port. With ``api_keys`` a request needs one of them."""
    app = information_app(service)
    app.state.body_budget = BodyBudget(service.config.server.max_unfinished_body_bytes)
    app.add_middleware(ApiKeyCheck, keys=api_keys)
    app.add_middleware(ResponseHeaders, lifecycle=service.lifecycle)
    for route in GENERATION_ROUTES:
        _add_generation(app, service, route)
    return app


def _add_generation(app: FastAPI, service: Service, route: str) -> None:
    @app.post(route)
    async def generate(request: Request) -> Response:
        service.lifecycle.check_accepting()
        _check_no_event_id(request)
        terms = terms_of(request.state.client_name, request.headers, service.config.server, time.monotonic())
        call = Call(
            body=await read_body(request),
            request_id=request.state.request_id,
            created=int(time.time()),
            task=request.headers.get(TASK_HEADER),
            capture=request.headers.get(CAPTURE_HEADER),
            terms=terms,
        )
        return await _answer(request, await cancel_on_disconnect(request, start(service, route, call)))


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
    if started.body.stream:
        return EventStream(started)
    try:
        work = asyncio.gather(*(generation.whole() for generation in started.generations))
        choices = await cancel_on_disconnect(request, work)
        content = await started.encode_whole(choices)
        return Response(content, headers=started.headers, media_type="application/json")
    finally:
        started.close()
