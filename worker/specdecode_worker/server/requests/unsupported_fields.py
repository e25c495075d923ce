"""Request fields outside the models: fields without effect, and unsupported fields with their neutral values."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from specdecode_worker.server.errors import BadRequest

# These fields control storage, billing or speed in other servers; they do not change the output.
WITHOUT_EFFECT = frozenset(
    {
        "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction", "request_id",
    }
)  # fmt: skip
# Unsupported fields that would change the output, with the values at which they have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "length_penalty": (1,),
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


def drop_neutral_fields(fields: dict[str, Any], known: Container[str]) -> dict[str, Any]:
    """Return the fields to validate: without nulls, fields without effect, and neutral values of unsupported fields.

    Args:
        fields: Fields of the request body.
        known: Names of the fields of the request model, which are kept.

    Raises:
        BadRequest: An unsupported field has a value that would change the output.
    """
    effective_fields = {}
    for name, value in fields.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in known or name not in NEUTRAL:
            effective_fields[name] = _whole(value)
        elif not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            raise unsupported(f"{name} is not supported with this value; leave it out", name)
    return effective_fields


def _whole(value: Any) -> Any:
    """Convert integral floats to int, because JSON does not distinguish 5.0 from 5.

    Float fields are not affected, because they accept integers too.
    """
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def unsupported(message: str, name: str) -> BadRequest:
    """Return the error for an unsupported field or value."""
    return BadRequest(message, param=name, code="unsupported_parameter")


def _same(value: Any, neutral: Any) -> bool:
    # False == 0 in Python, but a request with echo 0 differs from one with echo false.
    return isinstance(value, _SAME.get(type(neutral), (type(neutral),))) and (
        isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
    )
