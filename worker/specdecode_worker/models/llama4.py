"""Text of Llama 4: chunked attention, layers without positions, and layers of experts of which a token uses one.

Sources: transformers' modeling_llama4.py and configuration_llama4.py. Its checkpoints rotate neighbouring dimensions;
`Llama4.arrange` orders the rows of queries and keys so that halves are rotated, which changes no score. The norm of
queries and keys, which follows the rotation there, precedes it here: rotations keep it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from specdecode_worker.models.causal_lm import MLP, Architecture, Block, CausalLM, Experts, UnitNorm
from specdecode_worker.models.checkpoint import Entry
from specdecode_worker.models.config import CausalLMConfig, LayerKind, Temperature, target_fields
from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.fields import Fields

_DEFAULTS = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5}
_LONGEST = 2**20
"""Most positions without ``max_model_len``: Scout's 10 million would take 10 GiB of tables of rotary positions."""
_MOST_EXPERTS = 1024


class Llama4(CausalLM):
    """Target whose layers differ as its `LayerKind` say."""

    def layer(self, config: CausalLMConfig, index: int) -> Block:
        """Return the layer ``index`` of a new network."""
        kind = config.kind(index)
        dense = replace(config, intermediate_size=config.dense_intermediate_size)
        mlp = Experts(config, kind.experts) if kind.experts else MLP(dense)
        block = Block(replace(config, qk_norm=False), mlp=mlp)
        if config.qk_norm and kind.rotates:
            attention = block.self_attn
            attention.q_norm = attention.k_norm = UnitNorm(config.head_dim, config.rms_norm_eps)
        return block

    def arrange(self) -> None:
        """Order the rows of queries and keys of each rotating layer: the even dimensions of a head, then the odd."""
        for index, block in enumerate(self.model.layers):
            assert isinstance(block, Block)
            if self.config.kind(index).rotates:
                attention = block.self_attn
                for matrix, heads in ((attention.q_proj, attention.queries), (attention.k_proj, attention.keys)):
                    rows = torch.arange(heads * attention.head_dim).view(heads, -1, 2)
                    matrix.reorder(rows.transpose(1, 2).flatten())


def _read(fields: Fields, max_model_len: int | None) -> CausalLMConfig:
    fields.refuse("num_experts_per_tok", 1)
    limit = min(fields.integer("max_position_embeddings", 131072, most=2**31), max_model_len or _LONGEST)
    shared = target_fields(Fields({**_DEFAULTS, **fields.raw, "max_position_embeddings": limit}, fields.where))
    bias, layers = fields.flag("attention_bias"), shared["num_hidden_layers"]
    whole = fields.raw.get("attention_chunk_size", 8192) is None
    chunk = 0 if whole else fields.integer("attention_chunk_size", 8192, most=2**31)
    chunk = chunk if chunk < limit else 0  # a chunk that holds every text has no effect
    tunes = fields.raw.get("attn_temperature_tuning", True)
    if not isinstance(tunes, int):  # early files have the number 4 for true
        raise ConfigMismatch(f"{fields.where}: attn_temperature_tuning must be true, false or a number")
    temperature = Temperature(
        floor=fields.integer("floor_scale", 8192, most=2**31), scale=fields.number("attn_scale", 0.1)
    )
    kinds = _layer_kinds(fields, layers, chunked=chunk > 0)
    return CausalLMConfig(
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=fields.flag("use_qk_norm", True),
        layer_kinds=kinds,
        attention_chunk_size=chunk if any(kind.chunked for kind in kinds) else 0,
        temperature=temperature if tunes and temperature.floor <= limit else None,
        dense_intermediate_size=fields.integer("intermediate_size_mlp", 16384),
        **shared,
    )


def _layer_kinds(fields: Fields, layers: int, *, chunked: bool) -> tuple[LayerKind, ...]:
    """Return the kind of each layer. In ``no_rope_layers``, a one means a layer WITH rotary positions."""
    interval = fields.integer("no_rope_layer_interval", 4)
    rotates = fields.integers("no_rope_layers") or tuple(int((i + 1) % interval != 0) for i in range(layers))
    types = fields.texts("layer_types") or tuple(("full_attention", "chunked_attention")[bool(r)] for r in rotates)
    step = fields.integer("interleave_moe_layer_step", 1)
    listed = fields.integers("moe_layers") if fields.has("moe_layers") else tuple(range(step - 1, layers, step))
    if len(rotates) != layers or len(types) != layers:
        raise ConfigMismatch(f"{fields.where}: no_rope_layers and layer_types must have {layers} entries, or none")
    if other := set(types) - {"full_attention", "chunked_attention"}:
        raise ConfigMismatch(f"layer_types {sorted(other)} are not supported")
    experts = fields.integer("num_local_experts", 16, most=_MOST_EXPERTS)
    return tuple(
        LayerKind(bool(rotates[i]), chunked and types[i] == "chunked_attention", experts if i in listed else 0)
        for i in range(layers)
    )


def _read_nested(fields: Fields, max_model_len: int | None) -> CausalLMConfig:
    """Read the text part of a model of text and images. What says how weights are stored is at the top level."""
    text = fields.part("text_config")
    stored = {name: fields.raw[name] for name in ("quantization_config", "compression_config") if fields.has(name)}
    return _read(Fields({**text.raw, **stored}, text.where), max_model_len)


def _tensor_name(name: str) -> str | None:
    if name.startswith(("vision_model.", "multi_modal_projector.")):
        return None
    return name.removeprefix("language_model.").replace(".feed_forward.", ".mlp.")


def _entries(name: str, shape: tuple[int, ...]) -> Mapping[str, Entry]:
    """Return the experts' matrices in a fused tensor of a file: gate beside up, or down, each transposed."""
    prefix, found, matrix = name.rpartition(".experts.")
    if not found or len(shape) != 3 or matrix not in ("gate_up_proj", "down_proj"):
        return {}
    parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
    width = shape[2] // len(parts)
    return {
        f"{prefix}.experts.{expert}.{part}.weight": Entry(expert, at * width, (at + 1) * width)
        for expert in range(shape[0])
        for at, part in enumerate(parts)
    }


LLAMA4 = Architecture(
    name="Llama4ForCausalLM",
    model_type="llama4_text",
    read=_read,
    network=Llama4,
    tensor_name=_tensor_name,
    entries=_entries,
)
LLAMA4_WITH_IMAGES = replace(LLAMA4, name="Llama4ForConditionalGeneration", model_type="llama4", read=_read_nested)
