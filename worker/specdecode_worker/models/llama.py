"""Llama 2 and 3."""

from __future__ import annotations

from specdecode_worker.models.causal_lm import Architecture
from specdecode_worker.models.config import CausalLMConfig, refuse_window, target_fields, window_field
from specdecode_worker.models.fields import Fields


def _read(fields: Fields, max_model_len: int | None) -> CausalLMConfig:
    shared = target_fields(fields, kv_heads_required=False)
    refuse_window(fields, window_field(fields), shared["max_position_embeddings"], max_model_len)
    bias = fields.flag("attention_bias")
    return CausalLMConfig(qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias"), **shared)


LLAMA = Architecture(name="LlamaForCausalLM", model_type="llama", read=_read)
