"""OpenAPI document of one worker, served at /openapi.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specdecode_worker.server.openapi.request_schemas import PREFIX, schemas_of, with_model_bounds
from specdecode_worker.server.openapi.response_schemas import ANSWERS, COUNT, TEXT, record
from specdecode_worker.server.request_sampling import ModelLimits
from specdecode_worker.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from specdecode_worker.server.version import VERSION

Json = dict[str, Any]

_JSON, _SSE, _PLAIN = "application/json", "text/event-stream", "text/plain"
_ERRORS = {
    400: "the request is invalid; param names the field",
    401: "an API key is required",
    404: "the model does not exist",
    413: "the body is too large",
    429: "the waiting queue is full",
    500: "the engine failed on the request",
    503: "loading, draining, a full wait in the queue, or the engine is gone",
    504: "the deadline passed before the response was complete",
}
_READING = (401, 404, 503)
_POSTING = (400, 401, 404, 413, 503)
_GENERATING = tuple(_ERRORS)
_RETRY: Json = {"Retry-After": {"schema": COUNT, "description": "seconds, estimated from recent completions"}}
_HEADERS: list[Json] = [
    {"name": "X-Specdecode-Task", "in": "header", "schema": TEXT, "description": "task label of the request"},
    {
        "name": "X-Specdecode-Capture",
        "in": "header",
        "schema": TEXT,
        "description": 'only "true" and "on" permit the capture of the request',
    },
    {
        "name": "X-Request-Timeout",
        "in": "header",
        "schema": {"type": "number", "exclusiveMinimum": 0},
        "description": "seconds after which the request is cancelled",
    },
    {
        "name": "X-Request-Id",
        "in": "header",
        "schema": TEXT,
        "description": "returned in the response, and part of the response id",
    },
]


def document(served_name: str, limits: ModelLimits | None) -> Json:
    """Return the OpenAPI document for the served model.

    Args:
        served_name: Name of the model in requests.
        limits: Limits of the model; None while it loads, and the document then has no bounds of the model.
    """
    schemas = schemas_of(CompletionRequest, ChatRequest, TokenizeRequest, TokenizeChatRequest, DetokenizeRequest)
    if limits is not None:
        schemas = with_model_bounds(schemas, limits.vocab_size, limits.max_model_len)
    for name in ("CompletionRequest", "ChatRequest"):
        schemas[name]["properties"]["model"] = {"enum": [served_name], "description": "the model that is served"}
    for name in ("TokenizeRequest", "TokenizeChatRequest", "DetokenizeRequest"):
        schemas[name]["properties"]["model"] = {"enum": [served_name, None]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "specdecode", "version": VERSION},
        "paths": _paths(served_name),
        "security": [{}, {"key": []}],
        "components": {
            "schemas": {**schemas, **ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths(served_name: str) -> Json:
    one_model: Json = {"name": "name", "in": "path", "required": True, "schema": {"enum": [served_name]}}
    return {
        "/v1/completions": {"post": _generation_operation("CompletionRequest", "Completion")},
        "/v1/chat/completions": {"post": _generation_operation("ChatRequest", "ChatCompletion")},
        "/v1/models": {"get": {"responses": _responses(_content("ModelList"), _READING)}},
        "/v1/models/{name}": {"get": {"parameters": [one_model], "responses": _responses(_content("Model"), _READING)}},
        "/tokenize": {"post": _post_operation(("TokenizeRequest", "TokenizeChatRequest"), "Tokens")},
        "/detokenize": {"post": _post_operation(("DetokenizeRequest",), "Text")},
        "/version": {"get": {"responses": _responses(_content("Version"), ())}},
        "/health": {"get": {"responses": _probe_responses("the engine has failed")}},
        "/ready": {"get": {"responses": _probe_responses("the worker is loading, shutting down or failed")}},
        "/metrics": {"get": {"responses": _responses({_PLAIN: {"schema": TEXT}}, (503,))}},
    }


def _generation_operation(request: str, answer: str) -> Json:
    stream = {_SSE: {"schema": {**record(data=TEXT), "description": "with stream: one event per chunk, then [DONE]"}}}
    return {
        "parameters": _HEADERS,
        "requestBody": _body((request,)),
        "responses": _responses(_content(answer) | stream, _GENERATING),
    }


def _post_operation(requests: tuple[str, ...], answer: str) -> Json:
    return {"requestBody": _body(requests), "responses": _responses(_content(answer), _POSTING)}


def _body(names: tuple[str, ...]) -> Json:
    schemas = [_ref(name) for name in names]
    return {"required": True, "content": {_JSON: {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}}


def _responses(content: Json, errors: Iterable[int]) -> Json:
    responses: Json = {"200": {"description": "the response", "content": content}}
    for status in errors:
        responses[str(status)] = {"description": _ERRORS[status], "content": _content("Error")}
        if status in (429, 503):
            responses[str(status)]["headers"] = _RETRY
    return responses


def _probe_responses(fails: str) -> Json:
    text = {_PLAIN: {"schema": TEXT}}
    return {"200": {"description": "success", "content": text}, "503": {"description": fails, "content": text}}


def _content(name: str) -> Json:
    return {_JSON: {"schema": _ref(name)}}


def _ref(name: str) -> Json:
    return {"$ref": PREFIX + name}
