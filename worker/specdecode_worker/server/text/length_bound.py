"""Upper bound of the bytes per token, by which a text that is too long is refused without tokenizing it.

A text of B bytes has at least B / b tokens if no token represents more than b bytes of it. The longest token of the
vocabulary gives b, provided that nothing between text and tokens removes or merges characters. Each part of the
tokenizer is therefore checked, and parts that are not known to keep all characters give no bound.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import models

# Largest ratio of the UTF-8 bytes of a text to those of its NFC form: a Hangul syllable of 3 bytes is composed of
# three letters of 3 bytes each. `test_length_bound.py` computes it over all characters.
NFC_SHRINKAGE = 3
_KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace"})
_BYTES = 256


def most_bytes_per_token(model: tokenizers.Tokenizer) -> int | None:
    """Return the largest number of UTF-8 bytes of a text that one token can stand for; None if no bound is known."""
    shrinkage = _shrinkage(_state(model.normalizer))
    if shrinkage is None or not _keeps_text(_state(model.pre_tokenizer)) or not _has_all_bytes(model):
        return None
    if any(token.lstrip or token.rstrip for token in model.get_added_tokens_decoder().values()):
        return None  # such a token swallows any number of spaces beside it
    # A vocabulary writes a byte as one or more characters, so the written form is at least as long as its bytes.
    return shrinkage * max((len(piece.encode()) for piece in model.get_vocab(with_added_tokens=True)), default=1)


def _state(part: Any) -> dict[str, Any] | None:
    """Return the configuration of a part of the tokenizer, as in tokenizer.json; None for a missing part."""
    return None if part is None else dict(json.loads(part.__getstate__()))


def _shrinkage(normalizer: dict[str, Any] | None) -> int | None:
    """Return the factor by which a normalizer can shorten a text; None if it is unknown."""
    if normalizer is None:
        return 1
    match normalizer["type"]:
        case "Prepend":
            return 1
        case "NFC":
            return NFC_SHRINKAGE
        case "Replace":
            pattern = normalizer["pattern"].get("String")
            return 1 if pattern is not None and len(normalizer["content"].encode()) >= len(pattern.encode()) else None
        case "Sequence":
            factor = 1
            for part in normalizer["normalizers"]:
                if (one := _shrinkage(part)) is None:
                    return None
                factor *= one
            return factor
        case _:
            return None


def _keeps_text(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Return whether a pre-tokenizer only splits a text, and removes nothing from it."""
    if pre_tokenizer is None or pre_tokenizer["type"] in _KEEPING_PRE_TOKENIZERS:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(map(_keeps_text, pre_tokenizer["pretokenizers"]))
    return bool(pre_tokenizer["type"] == "Split" and pre_tokenizer["behavior"] != "Removed")


def _has_all_bytes(model: tokenizers.Tokenizer) -> bool:
    """Return whether every text has tokens. Otherwise unknown characters may vanish, or merge into one token."""
    if not isinstance(model.model, models.BPE):
        return False
    if model.model.byte_fallback:
        return all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(_BYTES))
    has_byte_letters = "ByteLevel" in str(_state(model.pre_tokenizer))
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return has_byte_letters and all(model.token_to_id(letter) is not None for letter in letters)
