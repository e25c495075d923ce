"""Tokens that the vocabularies of a target and a draft model share: those with the same bytes.

Added tokens match added tokens of the same text; all but special ones also match ordinary tokens of the same bytes. The
draft reads the target's tokens through `VocabularyMatch.draft_ids` and proposes those of `VocabularyMatch.proposals`,
as an EAGLE-3 head does with ``d2t``. The text stays in the target's own tokens; nothing is tokenized again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from specdecode_worker.models.errors import VocabularyMismatch
from specdecode_worker.models.vocabulary.token_bytes import Vocabulary

PROBE = """The quick brown fox -- isn't it? -- jumps over 13 lazy dogs, 1,024.50 times; e.g. "why"?
In the middle of the internationalisation, they were thinking about nothing other than what the others had.

def f(x: int) -> list[str]:\n\treturn [f"{x:>04d}"] * 3   # trailing   spaces   \r\n
SELECT name, COUNT(*) FROM t WHERE id <> 7 GROUP BY 1; <div class='a'>&amp;</div> \\frac{a}{b} https://x.org/?q=1&r=2
Žluťoučký kůň, ﬁne e\u0301 vs é, größer, ИЮНЬ, 你好世界, こんにちは, 한국어, مرحبا, नमस्ते, 🤖👩\u200d💻 ½ ①
\u00a0\u2003<s> </s> <unk> <|endoftext|> <|im_start|>user <|eot_id|> [INST] ünïcödé AAAAAAAAAA 0000000000 xX_yY-zZ"""
"""Probe text: words, numbers, code, markup, scripts, composed and decomposed letters, spaces, special tokens."""


@dataclass(frozen=True, slots=True)
class VocabularyMatch:
    """Tables between the token ids of a target and those of a draft model with another vocabulary."""

    draft_ids: tuple[int, ...]
    """Draft's id for each id of the target: the token with the same bytes, or the substitute."""
    proposals: Mapping[int, int]
    """Target's id for each draft id that is proposed. No two draft ids have the same target id."""


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
        VocabularyMismatch: A tokenizer cannot be read, or they differ in other tokens than added ones.
    """
    target, draft = read_tokenizer(target_folder), read_tokenizer(draft_folder)
    names = f"{draft_folder} cannot draft for {target_folder}"
    expect_same_ordinary_tokens(target, draft, names)
    if _by_id(target) == _by_id(draft):
        expect_same_splits(target, draft, names)
        return None
    ours, theirs = _tokens(target, target_size), _tokens(draft, draft_size)
    return _matched(ours, theirs, target_size, _substitute(draft, draft_size))


def expect_same_ordinary_tokens(target: Tokenizer, draft: Tokenizer, names: str) -> None:
    """Raise VocabularyMismatch, which names the first token that differs, unless only added tokens differ."""
    ours, theirs = (_by_id(tokenizer) for tokenizer in (target, draft))
    our_added, their_added = (tokenizer.get_added_tokens_decoder() for tokenizer in (target, draft))
    for token_id in sorted(ours.keys() | theirs.keys()):
        added = token_id in our_added or token_id in their_added
        if not added and ours.get(token_id) != theirs.get(token_id):
            raise VocabularyMismatch(
                f"{names}: token {token_id} is {_shown(theirs.get(token_id))} to the draft and "
                f"{_shown(ours.get(token_id))} to the target"
            )


def expect_same_splits(target: Tokenizer, draft: Tokenizer, names: str) -> None:
    """Raise VocabularyMismatch if the tokenizers split the probe text in different ways."""
    encodings = (tokenizer.encode(PROBE, add_special_tokens=False) for tokenizer in (target, draft))
    ours, theirs = (encoding.tokens for encoding in encodings)
    for place, pair in enumerate(zip([*ours, None], [*theirs, None], strict=False)):
        if pair[0] != pair[1]:
            raise VocabularyMismatch(
                f"{names}: token {place} of the probe text is {_shown(pair[1])} to the draft and {_shown(pair[0])} to "
                "the target"
            )


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read tokenizer.json without its padding and truncation. Raise VocabularyMismatch if that fails."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise VocabularyMismatch(f"{path} does not exist; without it nothing says which tokens target and draft share")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise VocabularyMismatch(f"{path} cannot be read: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _matched(ours: Sequence[_Token], theirs: Sequence[_Token], target_size: int, substitute: int) -> VocabularyMatch:
    by_first, by_any = dict[_Key, int](), dict[_Key, int]()
    for token in theirs:
        by_first.setdefault(token.keys[0], token.id)
    for token in theirs:
        for key in token.keys[1:]:
            by_any.setdefault(key, token.id)
    draft_ids, proposals = [substitute] * target_size, dict[int, int]()
    # Tokens with an equal first key come first, so that the proposal of A is A and not the byte <0x41>.
    for token in sorted(ours, key=lambda token: token.keys[0] not in by_first):
        ids = (by_key[key] for by_key in (by_first, by_any) for key in token.keys if key in by_key)
        if (draft_id := next(ids, None)) is not None:
            draft_ids[token.id] = draft_id
            proposals.setdefault(draft_id, token.id)
    return VocabularyMatch(tuple(draft_ids), proposals)


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


def _substitute(draft: Tokenizer, size: int) -> int:
    """Return the id that stands for tokens that the draft lacks: unknown, else padding, else the first special token.

    A tokenizer without any of them gives 0.
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
