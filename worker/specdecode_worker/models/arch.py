"""Registry of the architectures of targets and draft models.

A new architecture is a module with its `Architecture`, and an entry in the list below.
tests/architecture/test_registries.py holds that no other module names one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdecode_worker.models.causal_lm import Architecture, CausalLM
from specdecode_worker.models.config import CausalLMConfig, refuse_long
from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.fields import Fields
from specdecode_worker.models.llama import LLAMA
from specdecode_worker.models.llama4 import LLAMA4, LLAMA4_WITH_IMAGES
from specdecode_worker.models.mistral import MISTRAL
from specdecode_worker.models.qwen import QWEN2, QWEN3

ARCHITECTURES = {known.name: known for known in (LLAMA, LLAMA4, LLAMA4_WITH_IMAGES, QWEN2, QWEN3, MISTRAL)}


def causal_lm_config(raw: Mapping[str, Any], max_model_len: int | None = None) -> CausalLMConfig:
    """Read the config of a model that serves texts of up to ``max_model_len`` tokens.

    None for ``max_model_len`` selects the model's own limit.

    Raises:
        ConfigMismatch: the model is of no registered architecture, or uses an unsupported feature.
    """
    fields = Fields(raw)
    name = _name(fields)
    config = ARCHITECTURES[name].read(fields, max_model_len)
    # Rotary tables have a row for each position that is served.
    limit = config.max_position_embeddings
    positions = min(limit, max_model_len or limit)
    refuse_long(positions, config.head_dim)
    return replace(config, architecture=name, max_position_embeddings=positions, position_limit=limit)


def architecture_of(config: CausalLMConfig) -> Architecture:
    """Return the descriptor of a model's architecture."""
    return ARCHITECTURES[config.architecture]


def new_network(config: CausalLMConfig) -> CausalLM:
    """Return a network of ``config`` with random weights."""
    return architecture_of(config).network(config)


def _name(fields: Fields) -> str:
    names = fields.texts("architectures")
    if not names:
        kind = fields.text("model_type", "llama")
        names = tuple(known.name for known in ARCHITECTURES.values() if known.model_type == kind) or (kind,)
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ConfigMismatch(f"architectures {list(names)} is not supported; {', '.join(ARCHITECTURES)} are")
    return names[0]
