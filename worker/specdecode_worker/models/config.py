"""Shapes of the networks, read from Hugging Face's config.json.

Sources: transformers' LlamaConfig; EAGLE-3 heads as SafeAILab, vLLM and SGLang write them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdecode_worker.models.errors import ConfigMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling ("llama3" in config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Shape of a Llama 2 or 3 target."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """Layers whose inputs an EAGLE-3 head reads: 2, N//2, N-3 unless the head says otherwise."""
        n = self.num_hidden_layers
        return (min(2, n - 1), n // 2, max(n - 3, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """Shape of an EAGLE-3 head: one decoder layer over pairs (hidden state of the target, embedding)."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    norm_before_residual: bool
    aux_layers: tuple[int, ...]


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises ConfigMismatch when it is absent or no JSON object."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigMismatch(f"{path} does not exist; name a folder that holds config.json and *.safetensors") from None
    except ValueError as error:
        raise ConfigMismatch(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigMismatch(f"{path} holds no JSON object")
    return found


def llama_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Raises ConfigMismatch for a model that is no Llama or uses what is not supported."""
    architectures = raw.get("architectures") or ["LlamaForCausalLM"]
    if architectures != ["LlamaForCausalLM"]:
        raise ConfigMismatch(f"architectures {architectures} is not supported; only LlamaForCausalLM is")
    for flag in ("attention_bias", "mlp_bias"):
        if raw.get(flag):
            raise ConfigMismatch(f"{flag} true is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigMismatch(f"hidden_act {raw['hidden_act']!r} is not supported; only silu is")
    heads = _integer(raw, "num_attention_heads")
    eos = raw.get("eos_token_id")
    return LlamaConfig(
        vocab_size=_integer(raw, "vocab_size"),
        num_hidden_layers=_integer(raw, "num_hidden_layers"),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        **_block_fields(raw, heads),
    )


def eagle3_config(raw: Mapping[str, Any], target: LlamaConfig) -> Eagle3Config:
    """Raises ConfigMismatch when the head was made for a target of another shape."""
    heads = _integer(raw, "num_attention_heads")
    if raw.get("num_hidden_layers", 1) != 1:
        raise ConfigMismatch(f"num_hidden_layers {raw['num_hidden_layers']} of the draft is not supported; one is")
    fields = _block_fields(raw, heads)
    target_hidden = int(raw.get("target_hidden_size", fields["hidden_size"]))
    if target_hidden != target.hidden_size:
        raise ConfigMismatch(
            f"the draft was made for a target of hidden_size {target_hidden}, this target has {target.hidden_size}"
        )
    vocab = int(raw.get("vocab_size", target.vocab_size))
    if vocab != target.vocab_size:
        raise ConfigMismatch(f"the draft's vocab_size is {vocab}, the target's {target.vocab_size}")
    # Heads ship a short limit that only describes their training text; positions follow the target's.
    fields["max_position_embeddings"] = target.max_position_embeddings
    return Eagle3Config(
        target_hidden_size=target_hidden,
        vocab_size=vocab,
        draft_vocab_size=int(raw.get("draft_vocab_size", vocab)),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        aux_layers=_aux_layers(raw, target),
        **fields,
    )


def _aux_layers(raw: Mapping[str, Any], target: LlamaConfig) -> tuple[int, ...]:
    found = raw.get("eagle_aux_hidden_state_layer_ids") or (raw.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    if not found:
        return target.aux_layers
    ids = tuple(int(i) for i in found)
    # Two conventions exist: inputs of layers, or outputs (then the first id is 1, and input = output + 1).
    ids = tuple(i + 1 for i in ids) if ids[0] == 1 else ids
    if len(ids) != 3 or any(not 0 <= i < target.num_hidden_layers for i in ids):
        raise ConfigMismatch(f"eagle_aux_hidden_state_layer_ids {list(found)} do not name three layers of the target")
    return ids


def _block_fields(raw: Mapping[str, Any], heads: int) -> dict[str, Any]:
    hidden = _integer(raw, "hidden_size")
    return {
        "hidden_size": hidden,
        "intermediate_size": _integer(raw, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": int(raw.get("head_dim") or hidden // heads),
        "rms_norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "max_position_embeddings": int(raw.get("max_position_embeddings", 2048)),
        **_rope(raw),
    }


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    # transformers 5 nests everything in rope_parameters; before, rope_theta stood alone beside rope_scaling.
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind != "llama3":
        raise ConfigMismatch(f"rope scaling {kind!r} is not supported; llama3 and none are")
    return {
        "rope_theta": theta,
        "rope_scaling": RopeScaling(
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
        ),
    }


def _integer(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigMismatch(f"config.json: {name} must be a positive integer, got {value!r}")
    return value
