"""A byte-level tokenizer of 61 tokens for models with random weights: characters of JSON, letters and some merges."""

from __future__ import annotations

import json

END = 0
"""Token id that ends an answer."""
_CHARACTERS = '{}":,[]0123456789abcdefghijklmnopqrstuv_-\u0120\u010a\\.'
_MERGES = ["a b", "ab c", "n a", "na m", "nam e", '{ "', '" :', '" ,', "i d", "d e", "0 1", "t r", "u e", "tr ue"]


def tokenizer_json() -> str:
    """Return the contents of tokenizer.json. A space and a line break have their byte-level names."""
    words = ["</s>", *_CHARACTERS, *("".join(merge.split(" ")) for merge in _MERGES)]
    assert len(words) == len(set(words)) <= 61, len(words)
    words += [f"<unused{i}>" for i in range(61 - len(words))]
    special = ["</s>", *(word for word in words if word.startswith("<unused"))]
    added = [
        {"id": words.index(word), "content": word, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for word in special
    ]  # fmt: skip
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {word: i for i, word in enumerate(words)},
                "merges": _MERGES,
            },
        }
    )
