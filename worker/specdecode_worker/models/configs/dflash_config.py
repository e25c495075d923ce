"""Shape of DFlash heads, read from z-lab's config.json and checked against their target.

Sources: z-lab/dflash (dflash/model.py) and vLLM (vllm-project/vllm, vllm/model_executor/models/qwen3_dflash.py). Both
count ``target_layer_ids`` by the outputs of layers, so id i is the input of layer i + 1. Variants of the architecture
that these files also read (sliding windows, causal blocks, sinks, scaled embeddings) are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdecode_worker.models.configs.config_fields import Fields
from specdecode_worker.models.configs.draft_config import expect_equal, head_blocks, head_vocabulary
from specdecode_worker.models.configs.target_config import BlockConfig, LlamaConfig
from specdecode_worker.models.errors import ConfigMismatch

_LONGEST_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(BlockConfig):
    """Shape of a DFlash head. ``aux_layers`` are the target's layers whose inputs it reads.

    ``block_size`` is the number of slots of a block that the head was trained on, the root included.
    """

    vocab_size: int
    aux_layers: tuple[int, ...]
    mask_token_id: int
    block_size: int
    num_hidden_layers: int


def dflash_config(raw: Mapping[str, Any], target: LlamaConfig) -> DFlashConfig:
    """Read the config of a DFlash head.

    Raises:
        ConfigMismatch: the head was made for a target of another shape, or uses an unsupported feature.
    """
    fields = Fields(raw)
    if fields.has("speculators_model_type"):
        raise ConfigMismatch(
            f"speculators_model_type {fields.text('speculators_model_type')!r} is no z-lab DFlash head"
        )
    nested = fields.part("dflash_config")
    for name in ("use_swa", "attention_sink_bias", "causal", "projector_type"):
        nested.refuse(name)
    for name in ("is_causal", "use_sliding_window", "add_swa_attention_sink_bias"):
        fields.refuse(name)
    for each in (nested, fields):
        each.refuse("input_embedding_scale", 1)
    if other := set(fields.texts("layer_types")) - {"full_attention"}:
        raise ConfigMismatch(f"config.json: layer_types {sorted(other)} are not supported")
    blocks = head_blocks(fields, target)
    expect_equal("hidden_size", blocks["hidden_size"], target.hidden_size)
    if fields.has("num_target_layers"):
        expect_equal("num_hidden_layers", fields.integer("num_target_layers"), target.num_hidden_layers)
    vocab = head_vocabulary(fields, target)
    return DFlashConfig(
        **{**blocks, "qk_norm": True},
        vocab_size=vocab,
        aux_layers=_aux_layers(nested, target),
        mask_token_id=nested.integer("mask_token_id", least=0, most=vocab - 1),
        block_size=fields.integer("block_size", least=2, most=_LONGEST_BLOCK),
        num_hidden_layers=fields.integer("num_hidden_layers", most=64),
    )


def _aux_layers(nested: Fields, target: LlamaConfig) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads."""
    ids = tuple(i + 1 for i in nested.integers("target_layer_ids"))
    if not ids or len(set(ids)) < len(ids) or any(i > target.num_hidden_layers for i in ids):
        given = list(nested.integers("target_layer_ids"))
        raise ConfigMismatch(f"{nested.where}: target_layer_ids {given} do not name layers of the target")
    return ids
