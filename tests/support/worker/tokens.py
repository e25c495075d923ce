"""Small byte-level tokenizers with a few merges."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the")]


def tokenizer(
    *,
    merges: list[tuple[str, str]] = MERGES,
    special: tuple[str, ...] = ("<eos>",),
    lowercase: bool = False,
    extra: tuple[str, ...] = (),
) -> Tokenizer:
    """Return a tokenizer with the vocabulary: bytes, then merged tokens, ``extra`` ones, then special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(a + b for a, b in MERGES), *extra]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    if lowercase:
        bpe.normalizer = normalizers.Lowercase()
    bpe.add_special_tokens([AddedToken(token, special=True) for token in special])
    return bpe


def saved(folder: Path, made: Tokenizer) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder
