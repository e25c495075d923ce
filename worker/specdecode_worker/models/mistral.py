"""Mistral, whose sliding window has a default."""

from __future__ import annotations

from specdecode_worker.models.causal_lm import Architecture
from specdecode_worker.models.config import CausalLMConfig, refuse_window, target_fields, window_field
from specdecode_worker.models.fields import Fields


def _read(fields: Fields, max_model_len: int | None) -> CausalLMConfig:
    shared = target_fields(fields)
    refuse_window(fields, window_field(fields, default=4096), shared["max_position_embeddings"], max_model_len)
    return CausalLMConfig(**shared)


MISTRAL = Architecture(name="MistralForCausalLM", model_type="mistral", read=_read)
