"""Tokenization of texts from clients: refused early if too long, and stopped between parts if the client is gone."""

from __future__ import annotations

import threading

from specdecode_worker.server.errors import ServerError
from specdecode_worker.server.text.tokenizer import Tokenizer

TOKENS_FACTOR = 2
"""A text is refused here if it has more than this many times the tokens of the context.

The tokens of a text's beginning are those of the whole text except for a few at the cut. Beginnings are measured, so
the factor leaves a margin of a whole context for the cut.
"""
# A text of natural language has about four characters per token, so a text that fits is mostly tokenized once.
_FIRST_CHARACTERS_PER_TOKEN = 4
_GROWTH = 2


class TextTooLong(ServerError):
    """Error for a text that has more than ``TOKENS_FACTOR`` times the tokens of the context."""


class TextWorkStopped(ServerError):
    """Error that ends the work on a text whose request was cancelled."""


def check_stopped(stopped: threading.Event) -> None:
    """Raise TextWorkStopped if ``stopped`` is set."""
    if stopped.is_set():
        raise TextWorkStopped


def encode_bounded(
    tokenizer: Tokenizer,
    text: str,
    max_model_len: int,
    stopped: threading.Event,
    *,
    add_special_tokens: bool = True,
) -> list[int]:
    """Tokenize a text in time and memory that depend on the context length and not on the text.

    A text that is certainly too long by its bytes is not tokenized. Of others, growing beginnings are tokenized, until
    one is too long or holds the whole text.

    Args:
        tokenizer: Tokenizer of the model.
        text: Text of a client.
        max_model_len: Context length in tokens.
        stopped: Set when the result is not needed any more.
        add_special_tokens: Add the special tokens of the tokenizer, such as BOS.

    Raises:
        TextTooLong: The text has more than ``TOKENS_FACTOR`` times ``max_model_len`` tokens, or more bytes than
            ``max_model_len`` tokens can stand for.
        TextWorkStopped: ``stopped`` was set.
    """
    check_length(tokenizer, text, max_model_len)
    most = TOKENS_FACTOR * max_model_len
    size = _FIRST_CHARACTERS_PER_TOKEN * max_model_len
    while size < len(text):
        check_stopped(stopped)
        if len(tokenizer.encode(text[:size], add_special_tokens=False)) > most:
            raise TextTooLong
        size *= _GROWTH
    check_stopped(stopped)
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if len(ids) > most:
        raise TextTooLong
    return ids


def check_length(tokenizer: Tokenizer, text: str, max_model_len: int) -> None:
    """Raise TextTooLong if a text has more bytes than ``max_model_len`` tokens can stand for."""
    per_token = tokenizer.most_bytes_per_token
    if per_token is not None and _longer_in_bytes(text, per_token * max_model_len):
        raise TextTooLong


def _longer_in_bytes(text: str, most_bytes: int) -> bool:
    """Return whether ``text`` has more than ``most_bytes`` UTF-8 bytes."""
    return len(text) > most_bytes or (
        4 * len(text) > most_bytes and len(text.encode(errors="surrogatepass")) > most_bytes
    )
