"""Shapes of draft heads, read from config.json and checked against their target.

Sources: EAGLE-3 heads as SafeAILab, vLLM and SGLang read them (``norm_before_fc`` vllm-project/speculators#337,
``fc_norm`` and ``norm_output`` vllm-project/vllm#42764, the two conventions of layer ids sgl-project/sglang#25454).
EAGLE-1 follows SafeAILab's cnets1.py. The nested config of speculators is flattened as in vLLM's
transformers_utils/configs/speculators. Medusa follows FasterDecoding's MedusaConfig and vLLM's.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdecode_worker.models.configs.config_fields import Fields
from specdecode_worker.models.configs.target_config import BlockConfig, LlamaConfig, block_fields, refuse_unknown
from specdecode_worker.models.errors import ConfigMismatch

log = logging.getLogger(__name__)

_MOST_LAYERS = 64
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


def eagle3_config(raw: Mapping[str, Any], target: LlamaConfig) -> Eagle3Config:
    """Read the config of an EAGLE-3 head.

    Raises:
        ConfigMismatch: the head was made for a target of another shape, or uses an unsupported feature.
    """
    fields = flattened_fields(raw, "eagle3")
    fields.refuse("parallel_drafting")
    # speculators omits this field if it is true (vLLM's update_eagle3); all others omit it if it is false.
    return Eagle3Config(**eagle3_fields(fields, target, norm_before_residual=fields.has("speculators_model_type")))


def eagle3_fields(fields: Fields, target: LlamaConfig, *, norm_before_residual: bool) -> dict[str, Any]:
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
        "num_hidden_layers": fields.integer("num_hidden_layers", 1, most=_MOST_LAYERS),
        "norm_before_residual": fields.flag("norm_before_residual", norm_before_residual),
        "norm_before_fc": norm_before_fc,
        "fc_norm": fc_norm,
        "norm_output": fields.flag("norm_output"),
        **blocks,
    }


def eagle_config(raw: Mapping[str, Any], target: LlamaConfig) -> EagleConfig:
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
        num_hidden_layers=fields.integer("num_hidden_layers", 1, most=_MOST_LAYERS),
        fc_bias=fields.flag(bias) if fields.has(bias) else None,
        **blocks,
    )


def medusa_config(raw: Mapping[str, Any], target: LlamaConfig) -> MedusaConfig:
    """Read the config of Medusa heads, with FasterDecoding's or vLLM's field names. Raise ConfigMismatch if invalid."""
    fields = Fields(raw)
    fields.refuse("original_lm_head")
    fields.refuse("logit_scale", 1)
    ours = fields.has("medusa_num_heads")
    expect_equal("hidden_size", fields.integer("hidden_size", target.hidden_size), target.hidden_size)
    vocab = head_vocabulary(fields, target)
    return MedusaConfig(
        num_heads=fields.integer("medusa_num_heads" if ours else "num_heads", most=64),
        num_layers=fields.integer("medusa_num_layers" if ours else "num_hidden_layers", 1, most=_MOST_LAYERS),
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


def head_blocks(fields: Fields, target: LlamaConfig) -> dict[str, Any]:
    """Return the fields of BlockConfig for a head. Positions follow the target's. Raise ConfigMismatch if invalid."""
    refuse_unknown(fields)
    # Heads declare a short limit that only describes their training text. Positions follow the target's.
    known = {**fields.raw, "max_position_embeddings": target.max_position_embeddings}
    bias = fields.flag("attention_bias")
    return block_fields(Fields(known)) | {
        "max_position_embeddings": target.max_position_embeddings,
        "qkv_bias": fields.flag("qkv_bias", bias),
        "o_bias": bias,
        "mlp_bias": fields.flag("mlp_bias"),
    }


def head_vocabulary(fields: Fields, target: LlamaConfig) -> int:
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


def _aux_layers(fields: Fields, nested: Fields, target: LlamaConfig) -> tuple[int, ...]:
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
