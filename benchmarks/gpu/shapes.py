"""The networks that are measured, as config.json would say them; weights are random (networks.py).

70B is one rank's eighth: heads, inner width and vocabulary divided by 8, hidden size whole, collectives left out. Its
draft is whole, since rank 0 runs it whole, but for the vocabulary, which is the target's eighth. Maverick is split
alike: every rank has an eighth of each expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

_COMMON = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "eos_token_id": 1}


@dataclass(frozen=True, slots=True)
class Shapes:
    """A target and its EAGLE-3 head. ``profile`` is the chance that a drafted token is right when those before it
    were, so that a chain of 3 brings ``tokens_per_step`` (published for MT-Bench, T=0: arXiv 2508.08192)."""

    name: str
    target: dict[str, Any]
    head: dict[str, Any]
    profile: float
    tokens_per_step: float
    note: str = ""
    quantization: Literal["fp8", "int4"] | None = None
    """Format of the matrices of the target's layers."""


def _llama(hidden: int, inner: int, layers: int, heads: int, kv: int, vocabulary: int, size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": size,
        "vocab_size": vocabulary,
        "max_position_embeddings": 16384,
        **_COMMON,
    }


def _llama4(experts: int, every: int, ranks: int, *, qk_norm: bool) -> dict[str, Any]:
    """Return Scout or Maverick, or one rank's part; ``every`` layers one has experts."""
    return {
        **_llama(5120, 8192 // ranks, 48, 40 // ranks, 8 // ranks, 202_048 // ranks, 128),
        "architectures": ["Llama4ForCausalLM"],
        "intermediate_size_mlp": 16384 // ranks,
        "num_local_experts": experts,
        "interleave_moe_layer_step": every,
        "use_qk_norm": qk_norm,
        "attention_chunk_size": 8192,
    }


def _head(target: dict[str, Any], draft_vocabulary: int, **changed: int) -> dict[str, Any]:
    changes = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, **changed}
    return {**target, **changes, "draft_vocab_size": draft_vocabulary}


_8B = _llama(4096, 14336, 32, 32, 8, 128_256, 128)
_70B_WHOLE = _llama(8192, 28672, 80, 64, 8, 128_256, 128)
_70B = _llama(8192, 28672 // 8, 80, 64 // 8, 8 // 8, 128_256 // 8, 128)
_TINY = _llama(64, 96, 3, 4, 2, 512, 16)

LLAMA_8B = Shapes("llama-3.1-8b", _8B, _head(_8B, 32_000), 0.7607, 2.78)
LLAMA_70B = Shapes("llama-3.1-70b", _70B_WHOLE, _head(_70B_WHOLE, 32_000), 0.7973, 2.94)
LLAMA_70B_EIGHTH = Shapes(
    "llama-3.1-70b, one rank of 8",
    _70B,
    _head(_70B, 128_256 // 8, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672),
    0.7973,
    2.94,
    "one rank's eighth; collectives left out; the draft is whole but for its vocabulary",
)
_SCOUT = _llama4(16, 1, 1, qk_norm=True)
_MAVERICK = _llama4(128, 2, 8, qk_norm=False)
SCOUT_INT4 = Shapes("llama-4-scout, int4", _SCOUT, _head(_SCOUT, 32_000), 0.7607, 2.78, quantization="int4")
SCOUT_FP8 = replace(SCOUT_INT4, name="llama-4-scout, fp8", quantization="fp8")
MAVERICK_EIGHTH = Shapes(
    "llama-4-maverick, fp8, one rank of 8",
    _MAVERICK,
    _head(_MAVERICK, 32_000 // 8, num_attention_heads=40, num_key_value_heads=8, intermediate_size=8192),
    0.7607,
    2.78,
    LLAMA_70B_EIGHTH.note,
    "fp8",
)
TINY = Shapes("tiny", _TINY, _head(_TINY, 256), 0.7607, 2.78)
_TINY_4 = _TINY | {"architectures": ["Llama4ForCausalLM"], "num_local_experts": 4, "interleave_moe_layer_step": 2}
_TINY_4 |= {"intermediate_size_mlp": 128, "attention_chunk_size": 64}
TINY_4 = Shapes("tiny, experts", _TINY_4, _head(_TINY_4, 256), 0.7607, 2.78)
