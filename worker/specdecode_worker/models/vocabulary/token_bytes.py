"""Bytes of single tokens, for log-probabilities and for drafts of another vocabulary.

A token can be an incomplete UTF-8 character without text.

Vocabularies write bytes in two ways. Byte-level BPE maps each of the 256 bytes to a printable character (GPT-2's
``bytes_to_unicode``). SentencePiece writes text with ``▁`` for a space, and bytes that are no text as ``<0x0A>``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import tokenizers

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


class Vocabulary:
    """Vocabulary of one tokenizer: the bytes and the written form of each token id."""

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        self._model = model
        self._added: Mapping[int, str] = {i: token.content for i, token in model.get_added_tokens_decoder().items()}
        self._letters = _byte_letters() if "ByteLevel(" in repr(model.decoder) else None

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token; empty for an id without a token."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._model.id_to_token(token) or ""
        if self._letters is not None:
            return bytes(self._letters[letter] for letter in piece if letter in self._letters)
        if (byte_match := _FALLBACK.fullmatch(piece)) is not None:
            return bytes.fromhex(byte_match[1])
        return piece.replace(_SPACE, " ").encode()

    def is_byte(self, token: int) -> bool:
        """Return whether the token is a byte that SentencePiece writes as ``<0x0A>``."""
        return self._letters is None and _FALLBACK.fullmatch(self.piece_of(token)) is not None

    def piece_of(self, token: int) -> str:
        """Return the token as the vocabulary writes it; empty for an id without a token."""
        return self._model.id_to_token(token) or ""


def _byte_letters() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE.

    Printable bytes map to themselves; the others map to the characters from U+0100 on, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
