"""OpenAPI description of the public port: request bodies, and the status codes of responses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specdecode_worker.server.admission import ModelLimits
from specdecode_worker.server.requests import (
    MAX_ID,
    NEUTRAL,
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestModel,
    TokenizeChatRequest,
    TokenizeRequest,
)
from specdecode_worker.version import VERSION

# JSON schemas of the request bodies, derived from the pydantic models that validate them.
#
# Rules that the models do not contain are added: null values, and the fields of `requests.NEUTRAL`.

Json = dict[str, Any]
_NULL: Json = {"type": "null"}
PREFIX = "#/components/schemas/"


def schemas_of(*kinds: type[RequestModel]) -> Json:
    """Return the schemas of ``kinds``, and of all models to which they refer, by name."""
    schemas: Json = {}
    for kind in kinds:
        schema = kind.model_json_schema(ref_template=PREFIX + "{model}")
        schemas |= schema.pop("$defs", {})
        schemas[kind.__name__] = _whole(schema)
    return schemas


def _whole(schema: Json) -> Json:
    """Complete the schema of a body: optional fields accept null, and unsupported fields accept neutral values."""
    required = schema.get("required", [])
    properties = {
        name: one if name in required else _or_null(one) for name, one in schema.get("properties", {}).items()
    }
    for name, values in NEUTRAL.items():
        properties.setdefault(name, {"enum": [*values, None], "description": "accepted with its neutral values only"})
    for name in sorted(WITHOUT_EFFECT):
        properties.setdefault(name, {"description": "accepted without effect"})
    return {**schema, "properties": properties}


def with_model_bounds(schema: Any, vocab_size: int, max_model_len: int) -> Any:
    """Return ``schema`` with the bounds of the served model: the largest token id and the largest max_tokens."""
    if isinstance(schema, list):
        return [with_model_bounds(one, vocab_size, max_model_len) for one in schema]
    if not isinstance(schema, dict):
        return schema
    bounded = {key: with_model_bounds(one, vocab_size, max_model_len) for key, one in schema.items()}
    if bounded.get("maximum") == MAX_ID:
        bounded["maximum"] = vocab_size - 1
    for name in ("max_tokens", "max_completion_tokens"):
        for one in bounded.get(name, {}).get("anyOf", ()):
            if one.get("type") == "integer":
                one["maximum"] = max_model_len - 1
    return bounded


def _or_null(schema: Json) -> Json:
    """Return a schema that also accepts null. The default stays at the top level of the schema."""
    inner = {key: value for key, value in schema.items() if key not in ("default", "title")}
    default = {key: value for key, value in schema.items() if key == "default" and value is not None}
    options = inner["anyOf"] if inner.keys() == {"anyOf"} else [inner]
    return {"anyOf": [*(one for one in options if one != _NULL), _NULL], **default}


# OpenAPI document of one worker, served at /openapi.json.

_JSON, _SSE, _PLAIN = "application/json", "text/event-stream", "text/plain"
_ERRORS = {
    400: "the request is invalid; param names the field",
    401: "an API key is required",
    404: "the model does not exist",
    413: "the body is too large",
    429: "the waiting queue is full",
    500: "the engine failed on the request",
    501: "this route of OpenAI's API is not built; the message has the alternative",
    503: "loading, draining, a full wait in the queue, or the engine is gone",
    504: "the deadline passed before the response was complete",
}
_READING = (401, 404, 503)
_POSTING = (400, 401, 404, 413, 503)
_GENERATING = (*_POSTING, 429, 500, 504)
TEXT: Json = {"type": "string"}
_RETRY: Json = {
    "Retry-After": {"schema": {"type": "integer"}, "description": "seconds, estimated from recent completions"}
}


def _header(name: str, description: str, schema: Json = TEXT) -> Json:
    return {"name": name, "in": "header", "schema": schema, "description": description}


_HEADERS = [
    _header("X-Specdecode-Task", "task label of the request"),
    _header("X-Specdecode-Capture", 'only "true" and "on" permit the capture of the request'),
    _header("X-Request-Timeout", "seconds after which the request is cancelled",
            {"type": "number", "exclusiveMinimum": 0}),
    _header("X-Request-Id", "returned in the response, and part of the response id"),
]  # fmt: skip


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
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths(served_name: str) -> Json:
    one_model: Json = {"name": "name", "in": "path", "required": True, "schema": {"enum": [served_name]}}
    tokenize = _body("TokenizeRequest", "TokenizeChatRequest")
    paths: Json = {
        "/v1/completions": {"post": _generation("CompletionRequest")},
        "/v1/chat/completions": {"post": _generation("ChatRequest")},
        "/v1/models": {"get": _responses(_READING)},
        "/v1/models/{name}": {"get": {"parameters": [one_model], **_responses(_READING)}},
        "/tokenize": {"post": {"requestBody": tokenize, **_responses(_POSTING)}},
        "/detokenize": {"post": {"requestBody": _body("DetokenizeRequest"), **_responses(_POSTING)}},
        "/metrics": {"get": _responses((503,), _PLAIN)},
        "/version": {"get": _responses(())},
    }
    paths |= {path: {"get": _responses((503,), _PLAIN)} for path in ("/health", "/ready")}
    for path in ("/v1/responses", "/v1/embeddings"):
        paths[path] = {"post": {"responses": _errors((401, 501))}}
    return paths


def _generation(request: str) -> Json:
    return {"parameters": _HEADERS, "requestBody": _body(request), **_responses(_GENERATING, _JSON, _SSE)}


def _body(*names: str) -> Json:
    schemas = [{"$ref": PREFIX + name} for name in names]
    return {"required": True, "content": {_JSON: {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}}


def _responses(errors: Iterable[int], *media_types: str) -> Json:
    content: Json = {media_type: {} for media_type in media_types or (_JSON,)}
    return {"responses": {"200": {"description": "the response", "content": content}, **_errors(errors)}}


def _errors(statuses: Iterable[int]) -> Json:
    errors: Json = {}
    for status in statuses:
        errors[str(status)] = {"description": _ERRORS[status], "content": {_JSON: {}, _PLAIN: {}}}
        if status in (429, 503):
            errors[str(status)]["headers"] = _RETRY
    return errors
