"""A trained head as a folder that any EAGLE-3 engine loads: SafeAILab's tensor names, bf16, config.json."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specdecode_worker.models.config import Eagle3Config
from specdecode_worker.models.eagle3 import Eagle3Head
from specdecode_worker.models.rope import Scaling


def write_head(head: Eagle3Head, folder: Path) -> None:
    """config.json and model.safetensors; a reader never sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in head.state_dict().items()
    }
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    known[head.target_ids] = True
    partial = folder / "model.safetensors.partial"
    save_file({**tensors, "t2d": known}, partial, {"format": "pt"})
    os.rename(partial, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_document(head.config), indent=2) + "\n")


def config_document(config: Eagle3Config) -> dict[str, Any]:
    """config.json in the fields that SafeAILab's, vLLM's and SGLang's readers expect."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling(config.rope_scaling),
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _scaling(scaling: Scaling | None) -> dict[str, Any] | None:
    return None if scaling is None else {"rope_type": scaling.kind, **asdict(scaling)}
