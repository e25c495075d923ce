"""Vocabularies: the bytes of tokens, and which tokens two tokenizers share. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Tokenizer

from specdecode_worker.models.errors import VocabularyMismatch
from specdecode_worker.models.fields import listed_tokens, special_tokens

# Bytes of single tokens, for log-probabilities and for drafts of another vocabulary.
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


# Tokens that the vocabularies of a target and a draft model share: those with the same bytes.
#
# Added tokens match added tokens of the same text; all but special ones also match ordinary tokens of the same bytes.
# The draft reads the target's tokens through `VocabularyMatch.draft_ids` and proposes those of
# `VocabularyMatch.proposals`, as an EAGLE-3 head does with ``d2t``. The text stays in the target's own tokens; nothing
# is tokenized again.

TOKENIZER_FILE = "tokenizer.json"
SAMPLE = """The committee met on Tuesday to discuss how much of the budget should go to repairing roads, and whether
the new library could open before winter. "We have waited long enough," said the mayor, although nobody had asked. In
the end they agreed on 1,250,000 dollars, 12.5 % more than last year. Please write a short summary of the text below.

def read_lines(path: str, limit: int = 100) -> list[str]:
    # Return the first lines of a file.
    with open(path, encoding="utf-8") as file:
        return [line.rstrip() for index, line in enumerate(file) if index < limit]

First, let x be the number of apples. Then 3x + 7 = 22, so x = 5. Therefore, the answer is 5.

- Install the package: `pip install requests`
- Send a request: {"name": "Anna", "items": [1, 2, 3], "active": true}
"""
"""Text whose tokens measure the coverage: prose, code, arithmetic and markup, as assistants write them."""
MIN_COVERAGE = 0.5
"""Least share of the target's tokens of `SAMPLE` that a draft must have. A draft with a share c, even if it is always
right, has fewer than c / (1 - c) tokens accepted in a step; at one half that is a single token."""


@dataclass(frozen=True, slots=True)
class VocabularyMatch:
    """Tables between the token ids of a target and those of a draft model with another vocabulary."""

    draft_ids: tuple[int, ...]
    """Draft's id for each id of the target: the token with the same bytes, or the substitute."""
    proposals: Mapping[int, int]
    """Target's id for each draft id that is proposed. No two draft ids have the same target id."""
    coverage: float = 1.0
    """Share of the target's tokens of a sample text that are proposed."""


_Key = tuple[str, bytes]
"""Kind of a token and its bytes."""


@dataclass(frozen=True, slots=True)
class _Token:
    """Token with the keys under which it is matched, the best one first.

    A byte that SentencePiece writes as ``<0x41>`` stands beside the text ``A``, which is matched first. A special token
    has no text.
    """

    id: int
    keys: tuple[_Key, ...]


def match_vocabularies(
    target_folder: Path, draft_folder: Path, target_size: int, draft_size: int
) -> VocabularyMatch | None:
    """Match the tokenizers of two folders. Return None if they are equal.

    Args:
        target_folder: Folder of the target.
        draft_folder: Folder of the draft model.
        target_size: Number of rows of the target's embedding; ids beyond it are not used.
        draft_size: Number of rows of the draft's embedding; ids beyond it are not used.

    Raises:
        VocabularyMismatch: A tokenizer cannot be read, or the draft has too few of the target's tokens.
    """
    target, draft = read_tokenizer(target_folder), read_tokenizer(draft_folder)
    if _by_id(target) == _by_id(draft):
        return None
    ours, theirs = _tokens(target, target_size), _tokens(draft, draft_size)
    draft_ids, proposals = _matched(ours, theirs, target_size, _substitute(draft, draft_size))
    coverage = _coverage(target, target_size, set(proposals.values()))
    if coverage < MIN_COVERAGE:
        raise VocabularyMismatch(
            f"{draft_folder} cannot draft for {target_folder}: it has {coverage:.0%} of the tokens that the target "
            f"makes of a sample text, and {MIN_COVERAGE:.0%} are needed; take a draft model with a tokenizer that is "
            "closer to the target's, a head (method eagle3), or the method suffix or ngram"
        )
    return VocabularyMatch(tuple(draft_ids), proposals, coverage)


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
                f"{_shown(ours.get(token_id))} to the target; a head works on the target's embeddings, so only a draft "
                "of method draft-model may have another vocabulary"
            )


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read tokenizer.json without its padding and truncation. Raise VocabularyMismatch if that fails."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise VocabularyMismatch(f"{path} does not exist; without it nothing says which tokens target and draft share")
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


def _matched(
    ours: Sequence[_Token], theirs: Sequence[_Token], size: int, substitute: int
) -> tuple[list[int], dict[int, int]]:
    """Return ``draft_ids`` and ``proposals`` of the match."""
    by_first, by_any = dict[_Key, int](), dict[_Key, int]()
    for token in theirs:
        by_first.setdefault(token.keys[0], token.id)
    for token in theirs:
        for key in token.keys[1:]:
            by_any.setdefault(key, token.id)
    draft_ids, proposals = [substitute] * size, dict[int, int]()
    # Tokens with an equal first key come first, so that the proposal of A is A and not the byte <0x41>.
    for token in sorted(ours, key=lambda token: token.keys[0] not in by_first):
        ids = (by_key[key] for by_key in (by_first, by_any) for key in token.keys if key in by_key)
        if (draft_id := next(ids, None)) is not None:
            draft_ids[token.id] = draft_id
            proposals.setdefault(draft_id, token.id)
    return draft_ids, proposals


def _tokens(tokenizer: Tokenizer, size: int) -> list[_Token]:
    """Return the tokens below ``size`` in the order of their ids."""
    vocabulary, added = Vocabulary(tokenizer), tokenizer.get_added_tokens_decoder()

    def keys(token: int, data: bytes) -> tuple[_Key, ...]:
        if token in added:
            return (("added", data),) if added[token].special else (("added", data), ("text", data))
        kinds = ("byte", "text") if vocabulary.is_byte(token) else ("text", "byte")
        return tuple((kind, data) for kind in kinds)

    ids = (i for i in sorted(_by_id(tokenizer)) if i < size)
    return [_Token(i, keys(i, data)) for i in ids if (data := vocabulary.bytes_of(i))]


def _coverage(target: Tokenizer, size: int, proposed: Collection[int]) -> float:
    """Return the share of the target's tokens of `SAMPLE` that are in ``proposed``.

    A tokenizer that makes no tokens of it counts by its vocabulary.
    """
    try:
        ids = target.encode(SAMPLE, add_special_tokens=False).ids
    except Exception:  # the library raises no narrower type
        ids = []
    counted = [i for i in ids if i < size] or [i for i in _by_id(target) if i < size]
    return sum(i in proposed for i in counted) / max(len(counted), 1)


def _substitute(draft: Tokenizer, size: int) -> int:
    """Return the draft's id for tokens that it lacks.

    It is that of the unknown token, else of the padding token, else of the first special token, else 0.
    """
    unknown = getattr(draft.model, "unk_token", None)
    named = (unknown, "<unk>", "[UNK]", "<pad>", "[PAD]", "<|pad|>")
    ids = (draft.token_to_id(name) for name in named if name is not None)
    special = sorted(i for i, token in draft.get_added_tokens_decoder().items() if token.special)
    return next((i for i in (*ids, *special) if i is not None and i < size), 0)


def _by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}


def _shown(token: str | None) -> str:
    return "nothing" if token is None else repr(token)
