"""Shape of DFlash heads, read from config.json and checked against their target.

Two layouts are read. z-lab's has its own fields in ``dflash_config`` (z-lab/dflash, dflash/model.py; vllm-project/vllm,
vllm/model_executor/models/qwen3_dflash.py) and counts layers by their outputs, so id i is the input of layer i + 1. The
one of speculators nests the shape of the layers in ``transformer_layer_config``, counts layers by their inputs, and may
have a smaller draft vocabulary (vllm-project/speculators at c05b95b3: src/speculators/models/dflash/config.py, and
src/speculators/convert/dflash/converter.py for the ids of layers; vLLM's counterpart is ``update_dflash`` of
vllm/transformers_utils/configs/speculators/algos.py). Variants of the architecture that these files also read (sliding
windows, causal blocks, sinks, scaled embeddings, tokens proposed by the root's slot) are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdecode_worker.models.configs.config_fields import Fields
from specdecode_worker.models.configs.draft_config import (
    expect_equal,
    flattened_fields,
    head_blocks,
    head_vocabulary,
)
from specdecode_worker.models.configs.target_config import BlockConfig, LlamaConfig
from specdecode_worker.models.errors import ConfigMismatch

_LONGEST_BLOCK = 64
_IDS, _NESTED_IDS = "aux_hidden_state_layer_ids", "target_layer_ids"


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


def dflash_config(raw: Mapping[str, Any], target: LlamaConfig) -> DFlashConfig:
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
    own = _speculators_fields(fields, target, vocab) if is_speculators(raw) else _zlab_fields(fields, nested, target)
    mask = (fields if is_speculators(raw) else nested).integer("mask_token_id", least=0, most=vocab - 1)
    return DFlashConfig(
        **{**blocks, "qk_norm": True},
        **{"draft_vocab_size": vocab, **own},
        vocab_size=vocab,
        mask_token_id=mask,
        block_size=fields.integer("block_size", least=2, most=_LONGEST_BLOCK),
        num_hidden_layers=fields.integer("num_hidden_layers", most=64),
    )


def _refuse_variants(fields: Fields, nested: Fields) -> None:
    """Raise ConfigMismatch for variants of the architecture that are not supported."""
    for name in ("use_swa", "attention_sink_bias", "causal", "projector_type"):
        nested.refuse(name)
    for name in ("is_causal", "use_sliding_window", "add_swa_attention_sink_bias", "sample_from_anchor"):
        fields.refuse(name)
    for each in (nested, fields):
        each.refuse("input_embedding_scale", 1)
    if other := set(fields.texts("layer_types")) - {"full_attention"}:
        raise ConfigMismatch(f"config.json: layer_types {sorted(other)} are not supported")


def _zlab_fields(fields: Fields, nested: Fields, target: LlamaConfig) -> dict[str, Any]:
    """Return the values of `DFlashConfig` that z-lab's layout has in fields of its own."""
    if fields.has("num_target_layers"):
        expect_equal("num_hidden_layers", fields.integer("num_target_layers"), target.num_hidden_layers)
    return {"aux_layers": _aux_layers(nested, _NESTED_IDS, 1, target)}


def _speculators_fields(fields: Fields, target: LlamaConfig, vocab: int) -> dict[str, Any]:
    """Return the values of `DFlashConfig` that the layout of speculators has in fields of its own."""
    expect_equal("hidden_size", fields.integer("target_hidden_size", target.hidden_size), target.hidden_size)
    return {
        "aux_layers": _aux_layers(fields, _IDS, 0, target),
        "draft_vocab_size": fields.integer("draft_vocab_size", most=vocab),
    }


def _aux_layers(where: Fields, name: str, offset: int, target: LlamaConfig) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads: the ids of the field ``name``, plus ``offset``."""
    given = where.integers(name)
    ids = tuple(i + offset for i in given)
    if not ids or len(set(ids)) < len(ids) or any(i > target.num_hidden_layers for i in ids):
        raise ConfigMismatch(f"{where.where}: {name} {list(given)} do not name layers of the target")
    return ids
