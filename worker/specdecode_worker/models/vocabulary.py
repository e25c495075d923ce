"""Tokenizers of folders, and whether a draft has the tokens of its target. No torch."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from specdecode_worker.models.errors import VocabularyMismatch
from specdecode_worker.models.fields import listed_tokens, special_tokens

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
