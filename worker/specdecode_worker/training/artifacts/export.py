"""Export of a trained draft as a folder that inference engines load: config.json and bf16 weights.

EAGLE-3 and P-EAGLE heads can be written with the tensor names of SafeAILab, speculators or NeMo. EAGLE-1 heads get
SafeAILab's names, DFlash heads z-lab's, Medusa heads vLLM's, and a draft model its target's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdecode_worker.models.checkpoints.draft_weights import Draft
from specdecode_worker.models.networks.dflash import DFlashHead
from specdecode_worker.models.networks.eagle import EagleHead
from specdecode_worker.models.networks.eagle3 import Eagle3Head
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.training.artifacts import config_documents
from specdecode_worker.training.artifacts.atomic_files import write_json

Names = Literal["safeailab", "speculators", "nemo"]
FAMILIES: tuple[Names, ...] = ("safeailab", "speculators", "nemo")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def write_draft(draft: Draft, folder: Path, target_folder: Path, names: Names = "safeailab") -> None:
    """Write config.json and model.safetensors of a draft of any method. A reader never sees a partial file."""
    if isinstance(draft, Eagle3Head):
        write_head(draft, folder, names)
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _rounded(draft)
    if isinstance(draft, Llama):
        config = json.loads((target_folder / "config.json").read_text())
        document = config_documents.draft_model_config(config, draft.config)
        if draft.config.tie_word_embeddings:
            tensors.pop("lm_head.weight")
        for name in _TOKENIZER:
            if (target_folder / name).exists():
                shutil.copy(target_folder / name, folder / name)
    elif isinstance(draft, DFlashHead):
        target_layers = json.loads((target_folder / "config.json").read_text())["num_hidden_layers"]
        document = config_documents.dflash_config(draft.config, target_layers)
    elif isinstance(draft, EagleHead):
        document = config_documents.eagle_config(draft.config)
    else:
        document = config_documents.medusa_config(draft.config)
    _save(tensors, folder)
    write_json(folder / "config.json", document)


def write_head(head: Eagle3Head, folder: Path, names: Names = "safeailab") -> None:
    """Write an EAGLE-3 or P-EAGLE head. ``d2t`` and ``t2d`` are omitted if the draft vocabulary is the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _rounded(head)
    if head.config.draft_vocab_size < head.config.vocab_size:
        known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        known[head.target_ids] = True
        tensors["t2d"] = known
    else:
        tensors.pop("d2t")
    _save({_renamed(name, names): tensor for name, tensor in tensors.items()}, folder)
    document = config_documents.speculators_config if names == "speculators" else config_documents.eagle3_config
    write_json(folder / "config.json", document(head.config))


def _renamed(name: str, names: Names) -> str:
    """Return the tensor name in the family ``names``. Only the names of layers differ."""
    prefix = {"safeailab": "midlayer.", "speculators": "layers.0.", "nemo": "model.layers.0."}[names]
    name = re.sub(r"^midlayer\.", prefix, name)
    return re.sub(r"^layers\.", "model.layers.", name) if names == "nemo" else name


def _rounded(draft: Draft) -> dict[str, Tensor]:
    """Return the weights of ``draft`` in bf16; integer tensors stay as they are."""
    return {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in draft.state_dict().items()
    }


def _save(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write model.safetensors through a temporary file and one rename."""
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, {"format": "pt"})
    partial.chmod(0o644)  # safetensors writes files that only their owner can read; a worker is often another user
    os.rename(partial, folder / "model.safetensors")
