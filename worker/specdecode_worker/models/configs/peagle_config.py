"""Shape of P-EAGLE heads, read from config.json and checked against their target.

A P-EAGLE head is an EAGLE-3 head with a mask token. The token's id has three names: ``mask_token_id`` in the format
``peagle`` of speculators (vllm-project/speculators, src/speculators/models/peagle/config.py), ``ptd_token_id`` in heads
of an earlier version of that class, and ``pard_token`` in vLLM (vllm-project/vllm,
vllm/v1/spec_decode/llm_base_proposer.py reads all three).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdecode_worker.models.configs.config_fields import Fields
from specdecode_worker.models.configs.draft_config import Eagle3Config, eagle3_fields, flattened_fields
from specdecode_worker.models.configs.target_config import LlamaConfig
from specdecode_worker.models.errors import ConfigMismatch

_MASK_TOKEN_NAMES = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """Shape of a P-EAGLE head. ``mask_token_id`` is the token of every drafted position except the first."""

    mask_token_id: int


def peagle_config(raw: Mapping[str, Any], target: LlamaConfig) -> PEagleConfig:
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
