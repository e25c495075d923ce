"""Log-probability objects of chat and completion responses.

Log-probabilities are those of the raw distribution of the model, before temperature, truncation and penalties, as in
vLLM and OpenAI. So they do not depend on speculation or on the sampling parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specdecode_worker.models.vocabulary.token_bytes import Vocabulary
from specdecode_worker.server.responses.objects import ScoredToken

# Value that OpenAI uses for very unlikely tokens, because JSON has no infinity.
_LEAST = -9999.0


def chat_logprobs(scored: Sequence[ScoredToken], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return {"content": [{token, logprob, bytes, top_logprobs}]} of a chat response.

    ``bytes`` is exact also for a token that is an incomplete character.
    """
    return {"content": [_chat_token(one, vocabulary) for one in scored], "refusal": None}


def completion_logprobs(scored: Sequence[ScoredToken], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return four lists of equal length. ``top_logprobs`` has the most likely tokens and the sampled token."""
    return {
        "text_offset": [one.offset for one in scored],
        "token_logprobs": [None if one.logprobs is None else _bounded(one.logprobs.logprob) for one in scored],
        "tokens": [_name(one.token, vocabulary) for one in scored],
        "top_logprobs": [
            None if one.logprobs is None else {_name(token, vocabulary): value for token, value in _all(one)}
            for one in scored
        ],
    }


def _chat_token(one: ScoredToken, vocabulary: Vocabulary) -> dict[str, Any]:
    assert one.logprobs is not None, "chat echoes no prompt"
    top = zip(one.logprobs.top_tokens, one.logprobs.top_logprobs, strict=True)
    return {
        **_entry(one.token, one.logprobs.logprob, vocabulary),
        "top_logprobs": [_entry(token, value, vocabulary) for token, value in top],
    }


def _entry(token: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    token_bytes = vocabulary.bytes_of(token)
    return {"token": token_bytes.decode(errors="replace"), "logprob": _bounded(logprob), "bytes": list(token_bytes)}


def _all(one: ScoredToken) -> Iterator[tuple[int, float]]:
    """Yield (token id, log-probability) of the most likely tokens, and of the sampled token if it is not among them."""
    assert one.logprobs is not None
    for token, value in zip(one.logprobs.top_tokens, one.logprobs.top_logprobs, strict=True):
        yield token, _bounded(value)
    if one.token not in one.logprobs.top_tokens:
        yield one.token, _bounded(one.logprobs.logprob)


def _name(token: int, vocabulary: Vocabulary) -> str:
    """Return the text of a token.

    An incomplete character is written as "bytes:" and hexadecimal escapes, as in OpenAI, so that keys are unique.
    """
    token_bytes = vocabulary.bytes_of(token)
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _bounded(logprob: float) -> float:
    return max(logprob, _LEAST)
