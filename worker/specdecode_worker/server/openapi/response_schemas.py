"""JSON schemas of the responses, on which clients can rely. They are hand-written: responses are plain dicts."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

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
        num_drafts=COUNT,
        num_draft_tokens=COUNT,
        num_accepted_tokens=COUNT,
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
