"""Qwen 2 and 2.5, whose queries, keys and values have biases, and Qwen 3, which norms queries and keys."""

from __future__ import annotations

from typing import Any

from specdecode_worker.models.causal_lm import Architecture
from specdecode_worker.models.config import CausalLMConfig, refuse_window, target_fields, window_field
from specdecode_worker.models.fields import Fields


def _read2(fields: Fields, max_model_len: int | None) -> CausalLMConfig:
    return CausalLMConfig(qkv_bias=True, **_shared(fields, max_model_len))


def _read3(fields: Fields, max_model_len: int | None) -> CausalLMConfig:
    bias = fields.flag("attention_bias")
    return CausalLMConfig(qkv_bias=bias, o_bias=bias, qk_norm=True, **_shared(fields, max_model_len, head_dim=128))


def _shared(fields: Fields, max_model_len: int | None, head_dim: int | None = None) -> dict[str, Any]:
    shared = target_fields(fields, head_dim=head_dim)
    # Without layer_types, the layers from max_window_layers on have a window.
    slides = fields.has("layer_types") or fields.integer("max_window_layers", 28, least=0) < shared["num_hidden_layers"]
    window = window_field(fields, default=4096) if slides and fields.flag("use_sliding_window") else None
    refuse_window(fields, window, shared["max_position_embeddings"], max_model_len)
    return shared


QWEN2 = Architecture(name="Qwen2ForCausalLM", model_type="qwen2", read=_read2)
QWEN3 = Architecture(name="Qwen3ForCausalLM", model_type="qwen3", read=_read3)
