"""What clients may send, checked once at the edge.

Three kinds of fields: those that are honoured (the models below), those that change no answer here (dropped), and
those that would change the answer and are not supported: their neutral values are dropped, others refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from specdecode_worker.server.errors import BadRequest

MAX_STOPS = 4
MAX_PROMPTS = 64

# These steer storage, billing or speed elsewhere; an answer is the same with and without them.
_WITHOUT_EFFECT = frozenset(
    {
        "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction", "parallel_tool_calls", "request_id",
    }
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "audio": (),
}
# Chat's own ``logprobs`` is a bool; of completions' count even 0 asks for something.
_SAME = {bool: (bool,), int: (int, float), float: (int, float)}


class _Checked(BaseModel):
    # strict: the text "0.5" is no number, as with OpenAI.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompt_list(value: Any) -> Any:
    """A text, token ids, or a list of either, as a list of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(item) is int for item in value)):
        return [value]
    if not isinstance(value, list) or not all(isinstance(item, str | list) for item in value):
        raise ValueError("must be a text, a list of token ids, or a list of either")
    for item in value:
        if isinstance(item, list) and not all(type(token) is int for token in item):
            raise ValueError("token ids must be integers")
    return value


def _plain_text(value: Any) -> Any:
    """Content as a text; OpenAI also writes it as a list of parts."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"only parts of type 'text' are supported, got {kind!r}")
    return "".join(part["text"] for part in value)


def _without_empty(value: Any) -> Any:
    """A message that a client echoes carries its unused fields as null or []."""
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if key == "content" or item not in (None, [])}
    return value


class StreamOptions(_Checked):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Random padding against side channels; OpenAI's own clients may turn it off, nobody is asked to have it."""


class ChatMessage(_Checked):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_plain_text)]
    name: str | None = None


class GenerationRequest(_Checked):
    """What both routes share. Defaults are OpenAI's; ``top_k``, ``stop_token_ids`` and ``ignore_eos`` are vLLM's."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS), BeforeValidator(_stop_list)
    ] = []
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(default=[], max_length=64)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def token_limit(self) -> int | None:
        """Most tokens of the answer that the client asks for."""
        return self.max_tokens


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: Annotated[list[str | list[int]], Field(min_length=1, max_length=MAX_PROMPTS), BeforeValidator(_prompt_list)]
    max_tokens: int | None = Field(default=16, ge=1)


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: list[Annotated[ChatMessage, BeforeValidator(_without_empty)]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


Request = TypeVar("Request", bound=GenerationRequest)


def parse(kind: type[Request], body: bytes) -> Request:
    """The request in ``body``. Raises BadRequest that names the field."""
    fields = _honoured(read_object(body))
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise bad_request(error) from None
    if "stream_options" in fields and not request.stream:
        raise BadRequest("stream_options is only allowed when stream is true", param="stream_options")
    return request


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``. Raises BadRequest."""
    try:
        found = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    return found


def bad_request(error: ValidationError) -> BadRequest:
    """The first of pydantic's complaints, in OpenAI's words."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        return BadRequest(f"unrecognized field: {param}", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return BadRequest(f"missing required field: {param}", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return BadRequest(f"invalid {param}: {message}" if param else message, param=param or None, code="invalid_value")


def _honoured(fields: dict[str, Any]) -> dict[str, Any]:
    """``fields`` without nulls, without what has no effect, and without neutral values. Raises BadRequest."""
    kept = {}
    for name, value in fields.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name not in _NEUTRAL:
            kept[name] = value
        elif not any(_same(value, neutral) for neutral in _NEUTRAL[name]):
            raise BadRequest(
                f"{name} is not supported with this value; leave it out", param=name, code="unsupported_parameter"
            )
    return kept


def _same(value: Any, neutral: Any) -> bool:
    # False == 0 in Python, but logprobs 0 and logprobs false are different questions.
    return isinstance(value, _SAME.get(type(neutral), (type(neutral),))) and (
        isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
    )


def _path(location: tuple[int | str, ...]) -> str:
    """('messages', 0, 'content') -> messages[0].content"""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
