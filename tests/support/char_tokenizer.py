"""A byte-level tokenizer of 61 tokens for models with random weights: characters of JSON, letters and some merges."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = 0
"""Token id that ends an answer."""
_CHARACTERS = '{}":,[]0123456789abcdefghijklmnopqrstuv_-\u0120\u010a\\.'
_MERGES = ["a b", "ab c", "n a", "na m", "nam e", '{ "', '" :', '" ,', "i d", "d e", "0 1", "t r", "u e", "tr ue"]


def tokenizer_json() -> str:
    """Return the contents of tokenizer.json. A space and a line break have their byte-level names."""
    merges = [tuple(merge.split(" ")) for merge in _MERGES]
    words = ["</s>", *_CHARACTERS, *map("".join, merges)]
    assert len(words) == len(set(words)) <= 61, len(words)
    words += [f"<unused{i}>" for i in range(61 - len(words))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["</s>", *(word for word in words if word.startswith("<unused"))]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    return str(tokenizer.to_str())
