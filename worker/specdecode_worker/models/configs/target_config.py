"""Shapes of targets, read from Hugging Face's config.json: Llama 2 and 3, Qwen 2 and 3, Mistral.

Defaults of absent fields come from transformers' configuration files. Unsupported features of a family are refused by
name. Shapes of drafts are in `draft_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdecode_worker.models.configs.config_fields import Fields
from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.networks.rope import Scaling, YarnScaling, read_rope

_MOST_LAYERS = 1024
_LONGEST = 2**31
_MOST_TABLE = 2**28
"""Most entries of a table of rotary positions (1 GiB of fp32): a million positions of 256 dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """Shape of decoder blocks, for targets and drafts."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Scaling | None
    max_position_embeddings: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """True if queries and keys are normed per head before they are rotated (Qwen 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(BlockConfig):
    """Shape of a target, or of a draft model: Llama and the families that share its blocks."""

    vocab_size: int
    num_hidden_layers: int
    tie_word_embeddings: bool
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """Layer inputs that an EAGLE-3 head reads by default: those of layers 2, N//2 and N-3 of N."""
        n = self.num_hidden_layers
        return (min(2, n - 1), n // 2, max(n - 3, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Differences between a family's blocks and Llama's, and the family's defaults for absent fields."""

    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    sliding_window: int | None = None


_FAMILIES = {
    "LlamaForCausalLM": _Family(model_type="llama"),
    "Qwen2ForCausalLM": _Family(model_type="qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": _Family(model_type="qwen3", qk_norm=True, head_dim=128),
    "MistralForCausalLM": _Family(model_type="mistral", sliding_window=4096),
}


def llama_config(raw: Mapping[str, Any], max_model_len: int | None = None) -> LlamaConfig:
    """Read the config of a target that serves texts of up to ``max_model_len`` tokens.

    None for ``max_model_len`` selects the model's own limit.

    Raises:
        ConfigMismatch: the model is of another family, or uses an unsupported feature.
    """
    fields = Fields(raw)
    architecture = _architecture(fields)
    family = _FAMILIES[architecture]
    refuse_unknown(fields)
    blocks = block_fields(fields, head_dim=family.head_dim, kv_heads_required=architecture != "LlamaForCausalLM")
    _refuse_window(fields, family, min(max_model_len or _LONGEST, blocks["max_position_embeddings"]))
    bias = family.model_type in ("llama", "qwen3") and fields.flag("attention_bias")
    return LlamaConfig(
        vocab_size=fields.integer("vocab_size"),
        num_hidden_layers=fields.integer("num_hidden_layers", most=_MOST_LAYERS),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        bos_token_id=fields.integers("bos_token_id")[0] if fields.integers("bos_token_id") else None,
        eos_token_ids=fields.integers("eos_token_id"),
        qkv_bias=bias or family.qkv_bias,
        o_bias=bias,
        mlp_bias=family.model_type == "llama" and fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        **blocks,
    )


def refuse_unknown(fields: Fields) -> None:
    """Raise ConfigMismatch for features that no network of this package supports."""
    if fields.text("hidden_act", "silu") != "silu":
        raise ConfigMismatch(f"hidden_act {fields.raw['hidden_act']!r} is not supported; only silu is")
    for name in ("quantization_config", "compression_config"):
        if fields.has(name):
            raise ConfigMismatch(f"{fields.where}: {name}: quantised weights are not supported; take the bf16 model")
    fields.refuse("logit_scale", 1)


def block_fields(fields: Fields, *, head_dim: int | None = None, kv_heads_required: bool = False) -> dict[str, Any]:
    """Return the fields of BlockConfig that all families share, except biases. Raise ConfigMismatch if invalid."""
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads", most=2**16)
    kv_heads = fields.integer("num_key_value_heads", None if kv_heads_required else heads, most=heads)
    if heads % kv_heads:
        raise ConfigMismatch(f"{heads} num_attention_heads cannot share {kv_heads} num_key_value_heads")
    if not fields.has("head_dim") and head_dim is None and hidden % heads:
        raise ConfigMismatch(f"hidden_size {hidden} is no multiple of {heads} num_attention_heads; head_dim is needed")
    width = fields.integer("head_dim", head_dim or hidden // heads, most=4096)
    if width % 2:
        raise ConfigMismatch(f"head_dim {width} is odd; rotary positions need pairs")
    theta, scaling, positions = _positions(fields, width)
    return {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": positions,
    }


def _architecture(fields: Fields) -> str:
    architectures = fields.texts("architectures")
    if not architectures:
        kind = fields.text("model_type", "llama")
        architectures = tuple(name for name, family in _FAMILIES.items() if family.model_type == kind) or (kind,)
    if len(architectures) != 1 or architectures[0] not in _FAMILIES:
        raise ConfigMismatch(f"architectures {list(architectures)} is not supported; {', '.join(_FAMILIES)} are")
    return architectures[0]


def _refuse_window(fields: Fields, family: _Family, length: int) -> None:
    """Raise ConfigMismatch if a sliding window is shorter than the longest text.

    A longer window has no effect; sliding-window attention is not supported.
    """
    window = fields.integer("sliding_window", 0, least=0) if "sliding_window" in fields.raw else family.sliding_window
    if family.model_type in ("qwen2", "qwen3") and not fields.flag("use_sliding_window"):
        window = None
    kinds = set(fields.texts("layer_types"))
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise ConfigMismatch(f"layer_types {sorted(other)} are not supported")
    if kinds and "sliding_attention" not in kinds:
        window = None
    if window and window < length:
        raise ConfigMismatch(
            f"sliding_window {window} is below the longest text of {length} tokens, and windows are not supported; "
            f"set max_model_len to {window} or less"
        )


def _positions(fields: Fields, width: int) -> tuple[float, Scaling | None, int]:
    positions = fields.integer("max_position_embeddings", 2048, most=_LONGEST)
    theta, scaling = read_rope(fields, positions)
    if isinstance(scaling, YarnScaling):
        # As in vLLM: YaRN is often enabled without a change to max_position_embeddings.
        positions = max(positions, int(scaling.factor * scaling.original_max_position_embeddings))
    if positions * width > _MOST_TABLE:
        raise ConfigMismatch(
            f"max_position_embeddings {positions} is too large for head_dim {width}; lower it in config.json"
        )
    return theta, scaling, positions
