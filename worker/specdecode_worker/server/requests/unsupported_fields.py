"""Fields beyond those of the models: what changes no answer here, and what would."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from specdecode_worker.server.errors import BadRequest

# These steer storage, billing or speed elsewhere; an answer is the same with and without them.
WITHOUT_EFFECT = frozenset(
    {
        "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction", "request_id",
    }
)  # fmt: skip
# What would change the answer, and the values with which it changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "length_penalty": (1,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "audio": (),
    "priority": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "detokenize": (True,),
}
_SAME = {bool: (bool,), int: (int, float), float: (int, float)}


def honoured(fields: dict[str, Any], known: Container[str]) -> dict[str, Any]:
    """``fields`` without nulls, without what has no effect, and without neutral values; the ``known`` ones stay.

    Raises BadRequest."""
    kept = {}
    for name, value in fields.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in known or name not in NEUTRAL:
            kept[name] = _whole(value)
        elif not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            raise unsupported(f"{name} is not supported with this value; leave it out", name)
    return kept


def _whole(value: Any) -> Any:
    """JSON knows one kind of number: 5.0 is as whole as 5. Fields of real numbers take whole ones too."""
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def unsupported(message: str, name: str) -> BadRequest:
    return BadRequest(message, param=name, code="unsupported_parameter")


def _same(value: Any, neutral: Any) -> bool:
    # False == 0 in Python, but echo 0 and echo false are different things to send.
    return isinstance(value, _SAME.get(type(neutral), (type(neutral),))) and (
        isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
    )
