"""Shape of a model: what config.json says of layers, heads, rotary embedding and special tokens."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3 scaling: long wavelengths are stretched, short ones are kept, and those between are blended."""

    kind: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Linear scaling: positions are divided by ``factor``."""

    kind: ClassVar[str] = "linear"
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN scaling: low frequencies are stretched, high frequencies are kept.

    Cosines and sines are multiplied by ``attention_factor``.
    """

    kind: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


Scaling = RopeScaling | LinearScaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """Factor by which queries grow with their position, ``1 + scale * log(1 + floor((p + 1) / floor))``.

    It counters the flattening of softmax over long texts in layers without positions (arXiv 2501.19399).
    """

    floor: int
    scale: float

    def of(self, positions_T: Tensor) -> Tensor:
        """Return the factors [T, 1, 1] in fp32."""
        steps_T = torch.floor((positions_T.float() + 1) / self.floor)
        return (torch.log1p(steps_T) * self.scale + 1)[:, None, None]


_ROWS = 2**16
"""Rows of the tables computed at a time. This bounds the fp64 temporaries of long contexts."""
_KINDS = "default, linear, llama3 and yarn are"


def read_rope(fields: Fields, positions: int) -> tuple[float, Scaling | None]:
    """Return ``(theta, scaling)`` from config.json.

    ``positions`` is the value of ``max_position_embeddings``, the default original length of YaRN.

    Raises:
        ConfigMismatch: a field is invalid, the scaling is not supported, or there are two that differ.
    """
    # transformers 5 nests all fields in rope_parameters. Earlier versions have rope_theta at the top level, next to
    # rope_scaling. Of a file with both, transformers reads rope_scaling alone.
    parts = [fields.part(name) for name in ("rope_parameters", "rope_scaling")]
    given = [part for part in parts if part.raw] or parts[:1]
    theta, scaling = _read_rope(given[0], fields.number("rope_theta", 10000.0), positions)
    if any(_read_rope(part, theta, positions) != (theta, scaling) for part in given[1:]):
        raise ConfigMismatch(f"{fields.where}: rope_parameters and rope_scaling differ; keep one of them")
    fields.refuse("partial_rotary_factor", 1)
    return theta, scaling


def _read_rope(fields: Fields, theta: float, positions: int) -> tuple[float, Scaling | None]:
    """Return ``(theta, scaling)`` from one object; ``theta`` is its default."""
    fields.refuse("partial_rotary_factor", 1)
    if by_layer := [name for name, value in fields.raw.items() if isinstance(value, dict)]:
        raise ConfigMismatch(f"{fields.where}: {by_layer[0]}: rotary positions that differ by layer are not supported")
    theta = fields.number("rope_theta", theta, least=1.001)
    kind = fields.text("rope_type", fields.text("type", "default"))
    match kind:
        case "default":
            fields.refuse("mrope_section")
            return theta, None
        case "linear":
            return theta, LinearScaling(factor=fields.number("factor", least=1))
        case "llama3":
            return theta, _llama3(fields)
        case "yarn":
            return theta, _yarn(fields, positions)
        case _:
            raise ConfigMismatch(f"rope scaling {kind!r} is not supported; {_KINDS}")


def _llama3(fields: Fields) -> RopeScaling:
    scaling = RopeScaling(
        factor=fields.number("factor", least=1),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_position_embeddings=fields.integer("original_max_position_embeddings"),
    )
    if scaling.low_freq_factor > scaling.high_freq_factor:
        raise ConfigMismatch(f"{fields.where}: low_freq_factor must not be above high_freq_factor")
    return scaling


def _yarn(fields: Fields, positions: int) -> YarnScaling:
    factor = fields.number("factor", least=1)
    if fields.has("mscale") and fields.has("mscale_all_dim"):
        growth = _yarn_growth(factor, fields.number("mscale")) / _yarn_growth(factor, fields.number("mscale_all_dim"))
    else:
        growth = _yarn_growth(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=fields.integer("original_max_position_embeddings", positions),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=fields.number("attention_factor", growth),
        truncate=fields.flag("truncate", True),
    )


def _yarn_growth(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


class Rope(nn.Module):
    """Tables of cosines and sines, [positions, D].

    They are computed at construction and never loaded from a checkpoint.
    """

    cos_PD: Tensor
    sin_PD: Tensor

    def __init__(self, head_dim: int, positions: int, theta: float, scaling: Scaling | None) -> None:
        super().__init__()
        # Use the CPU even while a model is built on the meta device: no checkpoint contains these tables.
        frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
        growth = 1.0
        match scaling:
            case RopeScaling():
                frequency = _llama3_scaled(frequency, scaling)
            case LinearScaling():
                frequency = frequency / scaling.factor
            case YarnScaling():
                frequency, growth = _yarn_scaled(frequency, theta, scaling), scaling.attention_factor
        table = torch.empty(2, positions, head_dim, device="cpu")
        for start in range(0, positions, _ROWS):
            rows_P = torch.arange(start, min(start + _ROWS, positions), dtype=torch.float64, device="cpu")
            angle = torch.outer(rows_P, frequency).repeat(1, 2)
            table[0, start : start + _ROWS] = angle.cos() * growth
            table[1, start : start + _ROWS] = angle.sin() * growth
        self.register_buffer("cos_PD", table[0], persistent=False)
        self.register_buffer("sin_PD", table[1], persistent=False)

    def at(self, positions_T: Tensor, dtype: torch.dtype, factor_T11: Tensor | None = None) -> PassRotations:
        """Return the rotations of the positions [T] for a pass in ``dtype``, with factors of the queries."""
        return PassRotations(self.cos_PD, self.sin_PD, positions_T, dtype, factor_T11)


class PassRotations:
    """Rotations of one pass, shared by all of its layers.

    They are the rows ``positions_T`` of the tables ``cos_PD`` and ``sin_PD``. Queries are also multiplied by
    ``factor_T11``, if there is one.
    """

    def __init__(
        self,
        cos_PD: Tensor,
        sin_PD: Tensor,
        positions_T: Tensor,
        dtype: torch.dtype,
        factor_T11: Tensor | None = None,
    ) -> None:
        self.cos_PD, self.sin_PD, self.positions_T = cos_PD, sin_PD, positions_T
        self._dtype, self._factor_T11 = dtype, factor_T11

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the pass, each [T, 1, D], in the dtype of the model."""
        cos, sin = (table_PD[self.positions_T].unsqueeze(1) for table_PD in (self.cos_PD, self.sin_PD))
        return cos.to(self._dtype), sin.to(self._dtype)

    def rotate(self, x_THD: Tensor) -> Tensor:
        """Return queries or keys [T, heads, D] rotated to their positions."""
        return rotate(x_THD, *self.tables)

    def scaled(self, q_THD: Tensor) -> Tensor:
        """Return queries, rotated or not, multiplied by their factors."""
        return q_THD if self._factor_T11 is None else (q_THD * self._factor_T11).to(q_THD.dtype)


def _llama3_scaled(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Equal factors are a step, as in transformers.
    keep = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns >= low).double()
    return keep * frequency + (1 - keep) * frequency / scaling.factor


def _yarn_scaled(frequency: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Return the frequencies scaled by a linear ramp over dimensions.

    Dimensions up to the one with ``beta_fast`` full turns within the original context length are kept. Dimensions from
    the one with ``beta_slow`` turns on are stretched by ``factor``.
    """
    dims = 2 * len(frequency)

    def dimension(turns: float) -> float:
        return dims * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    span = high - low or 0.001  # as in transformers: a step instead of a division by zero
    stretch = ((torch.arange(len(frequency), dtype=torch.float64, device="cpu") - low) / span).clamp(0, 1)
    return stretch * frequency / scaling.factor + (1 - stretch) * frequency


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x_THD`` rotated by ``cos`` and ``sin`` [T, 1, D], in its own dtype."""
    half = x_THD.shape[-1] // 2
    turned = torch.cat((-x_THD[..., half:], x_THD[..., :half]), dim=-1)
    return (x_THD * cos + turned * sin).to(x_THD.dtype)


# Shapes of networks, read from config.json.

log = logging.getLogger(__name__)

# Shapes of targets and draft models, read from Hugging Face's config.json.
#
# The readers of the architectures, in their own modules, are made of `target_fields` and the functions below. Defaults
# of absent fields come from transformers' configuration files. Unsupported features are refused by name.

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


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Properties in which the layers of one network may differ."""

    rotates: bool = True
    """False for a layer whose attention knows no positions (NoPE, arXiv 2305.19466)."""
    chunked: bool = False
    """True for a layer whose queries see the keys of their own chunk of ``attention_chunk_size`` positions alone."""
    experts: int = 0
    """Number of experts beside the shared one; 0 for a layer with one MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLMConfig(BlockConfig):
    """Shape of a target, or of a draft model."""

    architecture: str = ""
    """Name in the registry `arch`, which enters it and builds the network."""
    vocab_size: int
    num_hidden_layers: int
    tie_word_embeddings: bool
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    layer_kinds: tuple[LayerKind, ...] = ()
    """Kind of each layer; empty if all layers are of the default kind."""
    position_limit: int = 0
    """Positions that config.json names, of which ``max_position_embeddings`` are served; 0 if they are the same."""
    attention_chunk_size: int = 0
    """Positions of a chunk of the chunked layers; 0 if there are none."""
    temperature: Temperature | None = None
    """Factor of the queries of layers that do not rotate."""
    dense_intermediate_size: int = 0
    """Channels of the MLP of a layer without experts, beside layers with experts of ``intermediate_size``; else 0."""

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """Layer inputs that an EAGLE-3 head reads by default: those of layers 2, N//2 and N-3 of N."""
        n = self.num_hidden_layers
        return (min(2, n - 1), n // 2, max(n - 3, 0))

    @property
    def widest_mlp(self) -> int:
        """Most channels of a token in one layer; a layer with experts has those of one, and of the shared one."""
        experts = any(kind.experts for kind in self.layer_kinds)
        return max(self.dense_intermediate_size, self.intermediate_size * (1 + experts))

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer."""
        return self.layer_kinds[layer] if self.layer_kinds else LayerKind()


def target_fields(fields: Fields, *, head_dim: int | None = None, kv_heads_required: bool = True) -> dict[str, Any]:
    """Return the fields of `CausalLMConfig` that all architectures read in the same way.

    Args:
        fields: Fields of config.json that describe the text model.
        head_dim: Default of ``head_dim``; None for hidden size over heads.
        kv_heads_required: Whether ``num_key_value_heads`` has no default.

    Raises:
        ConfigMismatch: a field is invalid, or names a feature that no architecture here supports.
    """
    refuse_unknown(fields)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "num_hidden_layers": fields.integer("num_hidden_layers", most=_MOST_LAYERS),
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "bos_token_id": next(iter(fields.integers("bos_token_id")), None),
        "eos_token_ids": fields.integers("eos_token_id"),
        **block_fields(fields, head_dim=head_dim, kv_heads_required=kv_heads_required),
    }


def window_field(fields: Fields, default: int | None = None) -> int | None:
    """Return the field ``sliding_window``: ``default`` if it is absent, None if it is null or 0."""
    return fields.integer("sliding_window", 0, least=0) or None if "sliding_window" in fields.raw else default


def refuse_window(fields: Fields, window: int | None, positions: int, max_model_len: int | None) -> None:
    """Raise ConfigMismatch if a sliding window is shorter than the longest text, which ``max_model_len`` may bound.

    A longer window has no effect; sliding-window attention is not supported.
    """
    kinds = set(fields.texts("layer_types"))
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise ConfigMismatch(f"layer_types {sorted(other)} are not supported")
    if kinds and "sliding_attention" not in kinds:
        window = None
    length = min(max_model_len or _LONGEST, positions)
    if window and window < length:
        raise ConfigMismatch(
            f"sliding_window {window} is below the longest text of {length} tokens, and windows are not supported; "
            f"set max_model_len to {window} or less"
        )


def split_config(config: CausalLMConfig, size: int) -> CausalLMConfig:
    """Return the shape of one of ``size`` devices' part: heads and channels of the MLPs are split.

    With fewer key-value heads than devices, each device has one, and neighbours have the same.

    Raises:
        ConfigMismatch: a dimension is not divisible by ``size``.
    """
    names = ["num_attention_heads", "intermediate_size", "dense_intermediate_size"]
    shared = config.num_key_value_heads < size and not size % config.num_key_value_heads
    for name in names + ["num_key_value_heads"] * (not shared):
        if getattr(config, name) % size:
            raise ConfigMismatch(
                f"{name} {getattr(config, name)} cannot be split over tensor_parallel_size {size}; take a divisor of it"
            )
    parts = {name: getattr(config, name) // size for name in names}
    return replace(config, num_key_value_heads=max(config.num_key_value_heads // size, 1), **parts)


def refuse_unknown(fields: Fields) -> None:
    """Raise ConfigMismatch for features that no network of this package supports."""
    if fields.text("hidden_act", "silu") != "silu":
        raise ConfigMismatch(f"hidden_act {fields.raw['hidden_act']!r} is not supported; only silu is")
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
    positions = fields.integer("max_position_embeddings", 2048, most=_LONGEST)
    theta, scaling = read_rope(fields, positions)
    if isinstance(scaling, YarnScaling):
        # As in vLLM: YaRN is often enabled without a change to max_position_embeddings.
        positions = max(positions, int(scaling.factor * scaling.original_max_position_embeddings))
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


def refuse_long(positions: int, head_dim: int) -> None:
    """Raise ConfigMismatch if the tables of rotary positions would be too large."""
    if positions * head_dim > _MOST_TABLE:
        raise ConfigMismatch(
            f"texts of {positions} tokens are too long for head_dim {head_dim}; "
            f"set max_model_len to {_MOST_TABLE // head_dim} or less"
        )


# Shapes of draft heads, read from config.json and checked against their target.
#
# Sources: EAGLE-3 heads as SafeAILab, vLLM and SGLang read them (``norm_before_fc`` vllm-project/speculators#337,
# ``fc_norm`` and ``norm_output`` vllm-project/vllm#42764, the two conventions of layer ids sgl-project/sglang#25454).
# EAGLE-1 follows SafeAILab's cnets1.py. The nested config of speculators is flattened as in vLLM's
# transformers_utils/configs/speculators. Medusa follows FasterDecoding's MedusaConfig and vLLM's.

_MOST_DRAFT_LAYERS = 64
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(BlockConfig):
    """Shape of an EAGLE-3 head: a layer over pairs (target hidden state, embedding), then ordinary layers.

    The inputs of the target's layers ``aux_layers`` are fused. If ``aux_layers`` is empty, the head reads the target's
    final hidden state directly and has no ``fc`` (``use_aux_hidden_state: false``).
    """

    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    num_hidden_layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    """True if one norm is applied to the concatenated states that ``fc`` reads."""
    fc_norm: bool = False
    """True if each state that ``fc`` reads has its own norm."""
    norm_output: bool = False
    """True if the next step reads the hidden state after the last norm instead of before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(BlockConfig):
    """Shape of an EAGLE-1 or EAGLE-2 head.

    ``fc_bias`` is None if config.json does not specify it; the weights then decide.
    """

    vocab_size: int
    num_hidden_layers: int = 1
    fc_bias: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Shape of Medusa heads: each has ``num_layers`` residual blocks and a matrix to the vocabulary."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int


def eagle3_config(raw: Mapping[str, Any], target: CausalLMConfig) -> Eagle3Config:
    """Read the config of an EAGLE-3 head.

    Raises:
        ConfigMismatch: the head was made for a target of another shape, or uses an unsupported feature.
    """
    fields = flattened_fields(raw, "eagle3")
    fields.refuse("parallel_drafting")
    # speculators omits this field if it is true (vLLM's update_eagle3); all others omit it if it is false.
    return Eagle3Config(**eagle3_fields(fields, target, norm_before_residual=fields.has("speculators_model_type")))


def eagle3_fields(fields: Fields, target: CausalLMConfig, *, norm_before_residual: bool) -> dict[str, Any]:
    """Return the values of `Eagle3Config` for a head of that architecture.

    Args:
        fields: Fields of config.json, flattened.
        target: Config of the target.
        norm_before_residual: Value of the field of this name if it is absent.

    Raises:
        ConfigMismatch: the head was made for a target of another shape, or uses an unsupported feature.
    """
    nested = fields.part("eagle_config")
    blocks = head_blocks(fields, target)
    hidden = fields.integer("target_hidden_size", blocks["hidden_size"])
    expect_equal("hidden_size", hidden, target.hidden_size)
    # A head maps its own tokens to the target's, so it still fits a target whose vocabulary has grown since.
    vocab = fields.integer("vocab_size", target.vocab_size)
    vocab = vocab if vocab < target.vocab_size else head_vocabulary(fields, target)
    reads_aux = nested.flag("use_aux_hidden_state", True)
    if not reads_aux and blocks["hidden_size"] != target.hidden_size:
        raise ConfigMismatch(f"use_aux_hidden_state false needs the target's hidden_size {target.hidden_size}")
    norm_before_fc = reads_aux and nested.flag("norm_before_fc", fields.flag("norm_before_fc"))
    fc_norm = reads_aux and fields.flag("fc_norm")
    if fc_norm and norm_before_fc:
        raise ConfigMismatch("config.json: fc_norm and norm_before_fc exclude each other; which one was trained?")
    return {
        "target_hidden_size": hidden,
        "vocab_size": vocab,
        "draft_vocab_size": fields.integer("draft_vocab_size", vocab, most=vocab),
        "aux_layers": _aux_layers(fields, nested, target) if reads_aux else (),
        "num_hidden_layers": fields.integer("num_hidden_layers", 1, most=_MOST_DRAFT_LAYERS),
        "norm_before_residual": fields.flag("norm_before_residual", norm_before_residual),
        "norm_before_fc": norm_before_fc,
        "fc_norm": fc_norm,
        "norm_output": fields.flag("norm_output"),
        **blocks,
    }


def eagle_config(raw: Mapping[str, Any], target: CausalLMConfig) -> EagleConfig:
    """Read the config of an EAGLE-1 or EAGLE-2 head.

    Raises:
        ConfigMismatch: the head was made for a target of another shape, or uses an unsupported feature.
    """
    fields = flattened_fields(raw, "eagle")
    for name in ("add_para_norm", "layernorms"):
        fields.refuse(name)
    blocks = head_blocks(fields, target)
    expect_equal("hidden_size", blocks["hidden_size"], target.hidden_size)
    bias = "fusion_bias" if fields.has("fusion_bias") else "bias"
    return EagleConfig(
        vocab_size=head_vocabulary(fields, target),
        num_hidden_layers=fields.integer("num_hidden_layers", 1, most=_MOST_DRAFT_LAYERS),
        fc_bias=fields.flag(bias) if fields.has(bias) else None,
        **blocks,
    )


def medusa_config(raw: Mapping[str, Any], target: CausalLMConfig) -> MedusaConfig:
    """Read the config of Medusa heads, with FasterDecoding's or vLLM's field names. Raise ConfigMismatch if invalid."""
    fields = Fields(raw)
    fields.refuse("original_lm_head")
    fields.refuse("logit_scale", 1)
    ours = fields.has("medusa_num_heads")
    expect_equal("hidden_size", fields.integer("hidden_size", target.hidden_size), target.hidden_size)
    vocab = head_vocabulary(fields, target)
    return MedusaConfig(
        num_heads=fields.integer("medusa_num_heads" if ours else "num_heads", most=64),
        num_layers=fields.integer("medusa_num_layers" if ours else "num_hidden_layers", 1, most=_MOST_DRAFT_LAYERS),
        hidden_size=target.hidden_size,
        vocab_size=vocab,
        draft_vocab_size=fields.integer("truncated_vocab_size", vocab, most=vocab),
    )


def flattened_fields(raw: Mapping[str, Any], kind: str) -> Fields:
    """Return the fields of a possibly nested config, and check its kind.

    speculators nests the layer's shape in ``transformer_layer_config``; the fields outside it take precedence.
    """
    fields = Fields(raw)
    declared_kind = fields.text("speculators_model_type", kind)
    if declared_kind != kind:
        raise ConfigMismatch(f"speculators_model_type {declared_kind!r} is no {kind} head")
    if not fields.has("transformer_layer_config"):
        return fields
    outside = {name: value for name, value in raw.items() if value is not None and name != "transformer_layer_config"}
    return Fields({**fields.part("transformer_layer_config").raw, **outside})


def head_blocks(fields: Fields, target: CausalLMConfig) -> dict[str, Any]:
    """Return the fields of BlockConfig for a head. Positions follow the target's. Raise ConfigMismatch if invalid."""
    refuse_unknown(fields)
    for name in ("quantization_config", "compression_config"):
        if fields.raw.get(name):
            raise ConfigMismatch(f"{fields.where}: {name}: heads are read unquantized; take the bf16 head")
    fields.refuse("use_sliding_window")
    if other := set(fields.texts("layer_types")) - {"full_attention"}:
        raise ConfigMismatch(f"{fields.where}: layer_types {sorted(other)} are not supported")
    # Heads declare a short limit that only describes their training text. Positions follow the target's.
    known = {**fields.raw, "max_position_embeddings": target.position_limit or target.max_position_embeddings}
    bias, blocks = fields.flag("attention_bias"), block_fields(Fields(known))
    refuse_long(target.max_position_embeddings, blocks["head_dim"])
    return blocks | {
        "max_position_embeddings": target.max_position_embeddings,
        "qkv_bias": fields.flag("qkv_bias", bias),
        "o_bias": bias,
        "mlp_bias": fields.flag("mlp_bias"),
    }


def head_vocabulary(fields: Fields, target: CausalLMConfig) -> int:
    """Return the size of the draft's whole vocabulary, which is the target's. Raise ConfigMismatch if it differs."""
    vocab = fields.integer("vocab_size", target.vocab_size)
    if vocab != target.vocab_size:
        raise ConfigMismatch(
            f"the draft's vocab_size is {vocab}, the target's {target.vocab_size}; a head works on the target's "
            "embeddings, so only a draft of method draft-model may have another vocabulary"
        )
    return vocab


def expect_equal(name: str, drafts: int, targets: int) -> None:
    """Raise ConfigMismatch unless a draft was made for the target's value of ``name``."""
    if drafts != targets:
        raise ConfigMismatch(f"the draft was made for a target of {name} {drafts}, this target has {targets}")


def _aux_layers(fields: Fields, nested: Fields, target: CausalLMConfig) -> tuple[int, ...]:
    declared_ids = fields.integers(_IDS) or nested.integers(_IDS)
    count = fields.integer("num_aux_hidden_states", len(declared_ids) or 3, most=target.num_hidden_layers + 1)
    if not declared_ids and count == 3:
        return target.aux_layers
    # Two conventions exist: layer inputs, or layer outputs (the first id is 1 then, and input = output + 1).
    outputs = declared_ids[:1] == (1,) and all(a < b for a, b in itertools.pairwise(declared_ids))
    ids = tuple(i + outputs for i in declared_ids)
    if len(ids) != count or any(i > target.num_hidden_layers for i in ids):
        raise ConfigMismatch(f"{_IDS} {list(declared_ids)} do not name {count} of the target's layers")
    meaning = "outputs" if outputs else "inputs"
    log.info("%s %s name %s of layers: reading the inputs of layers %s", _IDS, list(declared_ids), meaning, list(ids))
    return ids


# Shape of P-EAGLE heads, read from config.json and checked against their target.
#
# A P-EAGLE head is an EAGLE-3 head with a mask token. The token's id has three names: ``mask_token_id`` in the format
# ``peagle`` of speculators (vllm-project/speculators, src/speculators/models/peagle/config.py), ``ptd_token_id`` in
# heads of an earlier version of that class, and ``pard_token`` in vLLM (vllm-project/vllm,
# vllm/v1/spec_decode/llm_base_proposer.py reads all three).

_MASK_TOKEN_NAMES = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """Shape of a P-EAGLE head. ``mask_token_id`` is the token of every drafted position except the first."""

    mask_token_id: int


def peagle_config(raw: Mapping[str, Any], target: CausalLMConfig) -> PEagleConfig:
    """Read the config of a P-EAGLE head.

    Raises:
        ConfigMismatch: the head names no mask token, was made for a target of another shape, or uses an unsupported
            feature.
    """
    fields = flattened_fields(raw, "peagle")
    if fields.has("parallel_drafting") and not fields.flag("parallel_drafting"):
        raise ConfigMismatch("config.json: parallel_drafting false is no P-EAGLE head")
    shape = eagle3_fields(fields, target, norm_before_residual=False)
    return PEagleConfig(mask_token_id=_mask_token(fields, shape["vocab_size"]), **shape)


def _mask_token(fields: Fields, vocab_size: int) -> int:
    """Return the id of the mask token, which has a row in the draft's embedding."""
    names = [name for name in _MASK_TOKEN_NAMES if fields.has(name)]
    if not names:
        raise ConfigMismatch(f"config.json: a P-EAGLE head needs one of {', '.join(_MASK_TOKEN_NAMES)}")
    ids = {name: fields.integer(name, least=0, most=vocab_size - 1) for name in names}
    if len(set(ids.values())) > 1:
        raise ConfigMismatch(f"config.json: {' and '.join(names)} name different tokens; which one was trained?")
    return ids[names[0]]


# Shape of DFlash heads, read from config.json and checked against their target.
#
# Two layouts are read. z-lab's has its own fields in ``dflash_config`` (z-lab/dflash, dflash/model.py; vllm-
# project/vllm, vllm/model_executor/models/qwen3_dflash.py) and counts layers by their outputs, so id i is the input of
# layer i + 1. The one of speculators nests the shape of the layers in ``transformer_layer_config``, counts layers by
# their inputs, and may have a smaller draft vocabulary (vllm-project/speculators at c05b95b3:
# src/speculators/models/dflash/config.py, and src/speculators/convert/dflash/converter.py for the ids of layers; vLLM's
# counterpart is ``update_dflash`` of vllm/transformers_utils/configs/speculators/algos.py). Variants of the
# architecture that these files also read (sliding windows, causal blocks, sinks, scaled embeddings, tokens proposed by
# the root's slot) are refused by name.

_LONGEST_BLOCK = 64
_DFLASH_IDS, _NESTED_IDS = "aux_hidden_state_layer_ids", "target_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(BlockConfig):
    """Shape of a DFlash head. ``aux_layers`` are the target's layers whose inputs it reads.

    ``block_size`` is the number of slots of a block that the head was trained on, the root included.
    ``draft_vocab_size`` is ``vocab_size`` unless the head proposes only some of the target's tokens.
    """

    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    mask_token_id: int
    block_size: int
    num_hidden_layers: int


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Return whether config.json is in the layout of speculators."""
    return raw.get("speculators_model_type") is not None


def dflash_config(raw: Mapping[str, Any], target: CausalLMConfig) -> DFlashConfig:
    """Read the config of a DFlash head, in either layout.

    Raises:
        ConfigMismatch: the head was made for a target of another shape, or uses an unsupported feature.
    """
    fields = flattened_fields(raw, "dflash")
    nested = fields.part("dflash_config")
    _refuse_variants(fields, nested)
    blocks = head_blocks(fields, target)
    expect_equal("hidden_size", blocks["hidden_size"], target.hidden_size)
    vocab = head_vocabulary(fields, target)
    if is_speculators(raw):
        expect_equal("hidden_size", fields.integer("target_hidden_size", target.hidden_size), target.hidden_size)
        own, aux_layers = fields, _dflash_aux_layers(fields, _DFLASH_IDS, 0, target)
        draft_vocab = fields.integer("draft_vocab_size", most=vocab)
    else:
        if fields.has("num_target_layers"):
            expect_equal("num_hidden_layers", fields.integer("num_target_layers"), target.num_hidden_layers)
        own, aux_layers, draft_vocab = nested, _dflash_aux_layers(nested, _NESTED_IDS, 1, target), vocab
    return DFlashConfig(
        **blocks | {"qk_norm": True},
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        aux_layers=aux_layers,
        mask_token_id=own.integer("mask_token_id", least=0, most=vocab - 1),
        block_size=fields.integer("block_size", least=2, most=_LONGEST_BLOCK),
        num_hidden_layers=fields.integer("num_hidden_layers", most=64),
    )


def _refuse_variants(fields: Fields, nested: Fields) -> None:
    """Raise ConfigMismatch for variants of the architecture that are not supported."""
    for name in ("use_swa", "attention_sink_bias", "causal", "projector_type"):
        nested.refuse(name)
    for name in ("is_causal", "add_swa_attention_sink_bias", "sample_from_anchor"):
        fields.refuse(name)
    for each in (nested, fields):
        each.refuse("input_embedding_scale", 1)


def _dflash_aux_layers(where: Fields, name: str, offset: int, target: CausalLMConfig) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads: the ids of the field ``name``, plus ``offset``."""
    given = where.integers(name)
    ids = tuple(i + offset for i in given)
    if not ids or len(set(ids)) < len(ids) or any(i > target.num_hidden_layers for i in ids):
        raise ConfigMismatch(f"{where.where}: {name} {list(given)} do not name layers of the target")
    return ids
