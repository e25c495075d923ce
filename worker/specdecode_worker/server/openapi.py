"""OpenAPI description of the public port: request bodies, responses and errors."""

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
# Rules that the models do not contain are added: null values, and the fields of `requests.unsupported_fields`.

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


# JSON schemas of the responses, on which clients can rely. They are hand-written: responses are plain dicts.

TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
NUMBER: Json = {"type": "number"}


def record(**properties: Json) -> Json:
    """Return the schema of an object that requires all ``properties``."""
    return {"type": "object", "required": list(properties), "properties": properties}


def listed(items: Json) -> Json:
    """Return the schema of an array of ``items``."""
    return {"type": "array", "items": items}


def or_null(schema: Json) -> Json:
    """Return a schema that also accepts null."""
    return {"anyOf": [schema, {"type": "null"}]}


_ERROR = record(error=record(message=TEXT, type=TEXT, param=or_null(TEXT), code=or_null(TEXT)))
_USAGE = record(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=record(cached_tokens=COUNT),
)
_METRICS = record(
    speculative_decoding=record(
        mean_acceptance_length=NUMBER,
        draft_acceptance_rate=NUMBER,
        acceptance_histogram=listed(COUNT),
        num_spec_steps=COUNT,
        num_accepted_draft_tokens=COUNT,
        num_draft_tokens=COUNT,
        num_spec_tokens=COUNT,
    )
)
_REASON: Json = {"enum": ["stop", "length", "tool_calls"]}
_CALL = record(id=TEXT, type={"const": "function"}, function=record(name=TEXT, arguments=TEXT))
_MESSAGE = record(role={"const": "assistant"}, content=or_null(TEXT))
_MESSAGE["properties"]["tool_calls"] = listed(_CALL)
_TOP = record(token=TEXT, logprob=NUMBER, bytes=listed(COUNT))
_CHAT_LOGPROBS = record(content=listed(record(**_TOP["properties"], top_logprobs=listed(_TOP))))
_COMPLETION_LOGPROBS = record(
    text_offset=listed(COUNT),
    token_logprobs=listed(or_null(NUMBER)),
    tokens=listed(TEXT),
    top_logprobs=listed(or_null({"type": "object", "additionalProperties": NUMBER})),
)


def _answer(kind: str, choice: Json) -> Json:
    """Return the schema of a completion object with choices of schema ``choice``."""
    return record(
        id=TEXT,
        object={"const": kind},
        created=COUNT,
        model=TEXT,
        system_fingerprint=TEXT,
        choices=listed(choice),
        usage=_USAGE,
        metrics=_METRICS,
    )


_MODEL = record(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT, max_model_len=COUNT)

ANSWERS: Json = {
    "Error": _ERROR,
    "Completion": _answer(
        "text_completion",
        record(index=COUNT, text=TEXT, logprobs=or_null(_COMPLETION_LOGPROBS), finish_reason=_REASON),
    ),
    "ChatCompletion": _answer(
        "chat.completion",
        record(index=COUNT, message=_MESSAGE, logprobs=or_null(_CHAT_LOGPROBS), finish_reason=_REASON),
    ),
    "Model": _MODEL,
    "ModelList": record(object={"const": "list"}, data=listed(_MODEL)),
    "Tokens": record(count=COUNT, max_model_len=COUNT, tokens=listed(COUNT), token_strs=or_null(listed(TEXT))),
    "Text": record(prompt=TEXT),
    "Version": record(version=TEXT),
}


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
        "/v1/responses": {"post": {"responses": _not_built()}},
        "/v1/embeddings": {"post": {"responses": _not_built()}},
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


def _not_built() -> Json:
    return {str(status): {"description": _ERRORS[status], "content": _content("Error")} for status in (401, 501)}


def _probe_responses(fails: str) -> Json:
    text = {_PLAIN: {"schema": TEXT}}
    return {"200": {"description": "success", "content": text}, "503": {"description": fails, "content": text}}


def _content(name: str) -> Json:
    return {_JSON: {"schema": _ref(name)}}


def _ref(name: str) -> Json:
    return {"$ref": PREFIX + name}
