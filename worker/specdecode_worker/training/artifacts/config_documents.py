"""Content of config.json for trained drafts, in the formats that SafeAILab, vLLM, SGLang and speculators read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from specdecode_worker.models.configs.model_config import (
    DFlashConfig,
    Eagle3Config,
    EagleConfig,
    LlamaConfig,
    MedusaConfig,
    PEagleConfig,
)
from specdecode_worker.models.configs.target_config import BlockConfig
from specdecode_worker.models.networks.rope import Scaling


def eagle3_config(config: Eagle3Config) -> dict[str, Any]:
    """Return config.json of an EAGLE-3 or P-EAGLE head as SafeAILab, vLLM and SGLang read it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **_blocks(config, config.num_hidden_layers),
        **_eagle3_fields(config),
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def speculators_config(config: Eagle3Config) -> dict[str, Any]:
    """Return config.json of an EAGLE-3 or P-EAGLE head as speculators writes it.

    The fields of the layers are nested, the others are at the top level.
    """
    kind, name = ("peagle", "PEagleSpeculator") if isinstance(config, PEagleConfig) else ("eagle3", "Eagle3Speculator")
    return {
        "architectures": [name],
        "speculators_model_type": kind,
        **_eagle3_fields(config),
        "transformer_layer_config": {
            "model_type": "llama",
            **_blocks(config, config.num_hidden_layers),
            "vocab_size": config.vocab_size,
        },
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
        },
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def dflash_config(config: DFlashConfig, target_layers: int) -> dict[str, Any]:
    """Return config.json of a DFlash head as z-lab writes it and vLLM reads it."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **_blocks(config, config.num_hidden_layers),
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in config.aux_layers],
        },
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "num_target_layers": target_layers,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def eagle_config(config: EagleConfig) -> dict[str, Any]:
    """Return config.json of an EAGLE-1 head as SafeAILab and vLLM read it."""
    return {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        **_blocks(config, config.num_hidden_layers),
        "vocab_size": config.vocab_size,
        "bias": bool(config.fc_bias),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def medusa_config(config: MedusaConfig) -> dict[str, Any]:
    """Return config.json of Medusa heads as vLLM reads it."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "medusa_fc_bias": True,
        "dtype": "bfloat16",
    }


def draft_model_config(target: Mapping[str, Any], config: LlamaConfig) -> dict[str, Any]:
    """Return config.json of a draft model: the target's own, with fewer layers."""
    return {**target, "num_hidden_layers": config.num_hidden_layers, "dtype": "bfloat16"}


def _eagle3_fields(config: Eagle3Config) -> dict[str, Any]:
    """Return the fields that only EAGLE-3 and P-EAGLE heads have."""
    fields: dict[str, Any] = {
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
    }
    if isinstance(config, PEagleConfig):
        fields["mask_token_id"] = config.mask_token_id
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if getattr(config, name):
            fields[name] = True
    if not config.aux_layers:
        return fields | {"eagle_config": {"use_aux_hidden_state": False}}
    return fields | {"eagle_aux_hidden_state_layer_ids": list(config.aux_layers)}


def _blocks(config: BlockConfig, layers: int) -> dict[str, Any]:
    """Return the fields that describe the shape of the layers."""
    fields = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling(config.rope_scaling),
        "max_position_embeddings": config.max_position_embeddings,
    }
    biases = {"attention_bias": config.o_bias, "qkv_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    return fields | {name: True for name, has_bias in biases.items() if has_bias}


def _scaling(scaling: Scaling | None) -> dict[str, Any] | None:
    return None if scaling is None else {"rope_type": scaling.kind, **asdict(scaling)}
