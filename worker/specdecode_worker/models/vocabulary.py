"""Vocabularies: the bytes of tokens, and whether a draft has the target's tokens. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Tokenizer

from specdecode_worker.models.errors import VocabularyMismatch
from specdecode_worker.models.fields import listed_tokens, special_tokens

# Bytes of single tokens, for log-probabilities.
#
# A token can be an incomplete UTF-8 character without text.
#
# Vocabularies write bytes in two ways. Byte-level BPE maps each of the 256 bytes to a printable character (GPT-2's
# ``bytes_to_unicode``). SentencePiece writes text with ``▁`` for a space, and bytes that are no text as ``<0x0A>``.

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


# Tokenizers of folders, and the comparison of a draft's with its target's.

TOKENIZER_FILE = "tokenizer.json"


def expect_same_ordinary_tokens(target_folder: Path, draft_folder: Path) -> None:
    """Raise VocabularyMismatch, which names the first token that differs, unless only added tokens differ."""
    target, draft = read_tokenizer(target_folder), read_tokenizer(draft_folder)
    ours, theirs = (_by_id(tokenizer) for tokenizer in (target, draft))
    our_added, their_added = (tokenizer.get_added_tokens_decoder() for tokenizer in (target, draft))
    for token_id in sorted(ours.keys() | theirs.keys()):
        added = token_id in our_added or token_id in their_added
        if not added and ours.get(token_id) != theirs.get(token_id):
            raise VocabularyMismatch(
                f"{draft_folder}: token {token_id} is {_shown(theirs.get(token_id))} to the draft and "
                f"{_shown(ours.get(token_id))} to the target; take a draft with the target's tokenizer, or the method "
                "suffix or ngram"
            )


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read tokenizer.json without its padding and truncation. Raise VocabularyMismatch if that fails."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise VocabularyMismatch(f"{path} does not exist; it says whether target and draft have the same tokens")
    try:
        tokenizer = open_tokenizer(folder)
    except Exception as error:  # the library raises no narrower type
        raise VocabularyMismatch(f"{path} cannot be read: {error}") from None
    return tokenizer


def open_tokenizer(folder: Path) -> Tokenizer:
    """Read tokenizer.json without its padding and truncation, and add tokens that only other files of the folder name.

    As in transformers, those are the tokens of ``added_tokens_decoder``, and the special tokens with a name. They get
    the ids behind the vocabulary. Raises Exception, as the library does, or ConfigMismatch.
    """
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    named = set(special_tokens(folder).values())
    for listed in listed_tokens(folder).values():
        if (text := listed["content"]) not in added:
            added.add(text)
            flags = {name: bool(listed.get(name)) for name in ("single_word", "lstrip", "rstrip")}
            special = bool(listed.get("special")) or text in named
            normalized = bool(listed.get("normalized", not special))
            tokenizer.add_tokens([AddedToken(text, normalized=normalized, special=special, **flags)])
    tokenizer.add_tokens([AddedToken(text, special=True) for text in sorted(named - added)])
    return tokenizer


def _by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}


def _shown(token: str | None) -> str:
    return "nothing" if token is None else repr(token)
