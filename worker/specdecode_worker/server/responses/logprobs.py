"""Log-probabilities as each route writes them. They are of the model's raw distribution, before temperature,
truncation and penalties, as in vLLM and OpenAI, so that speculation and sampling cannot be seen in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specdecode_worker.server.responses.objects import Scored
from specdecode_worker.server.text.token_bytes import Vocabulary

# OpenAI's number for "very unlikely": JSON has no infinity.
_LEAST = -9999.0


def chat_logprobs(scored: Sequence[Scored], vocabulary: Vocabulary) -> dict[str, Any]:
    """{"content": [{token, logprob, bytes, top_logprobs}]}: a token that is half a character shows in ``bytes``."""
    return {"content": [_chat_token(one, vocabulary) for one in scored], "refusal": None}


def completion_logprobs(scored: Sequence[Scored], vocabulary: Vocabulary) -> dict[str, Any]:
    """Four lists of one length. ``top_logprobs`` holds the chosen token beside the most likely ones."""
    return {
        "text_offset": [one.offset for one in scored],
        "token_logprobs": [None if one.logprobs is None else _bounded(one.logprobs.logprob) for one in scored],
        "tokens": [_name(one.token, vocabulary) for one in scored],
        "top_logprobs": [
            None if one.logprobs is None else {_name(token, vocabulary): value for token, value in _all(one)}
            for one in scored
        ],
    }


def _chat_token(one: Scored, vocabulary: Vocabulary) -> dict[str, Any]:
    assert one.logprobs is not None, "chat echoes no prompt"
    top = zip(one.logprobs.top_tokens, one.logprobs.top_logprobs, strict=True)
    return {
        **_entry(one.token, one.logprobs.logprob, vocabulary),
        "top_logprobs": [_entry(token, value, vocabulary) for token, value in top],
    }


def _entry(token: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    found = vocabulary.bytes_of(token)
    return {"token": found.decode(errors="replace"), "logprob": _bounded(logprob), "bytes": list(found)}


def _all(one: Scored) -> Iterator[tuple[int, float]]:
    assert one.logprobs is not None
    for token, value in zip(one.logprobs.top_tokens, one.logprobs.top_logprobs, strict=True):
        yield token, _bounded(value)
    if one.token not in one.logprobs.top_tokens:
        yield one.token, _bounded(one.logprobs.logprob)


def _name(token: int, vocabulary: Vocabulary) -> str:
    """The token's text; half a character is written as OpenAI writes it, so that two of them never share a key."""
    found = vocabulary.bytes_of(token)
    try:
        return found.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def _bounded(logprob: float) -> float:
    return max(logprob, _LEAST)
