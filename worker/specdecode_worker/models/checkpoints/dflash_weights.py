"""Loading of DFlash heads in z-lab's layout (z-lab/dflash, dflash/model.py). They share embeddings and lm_head."""

from __future__ import annotations

from pathlib import Path

import torch

from specdecode_worker.models.checkpoints.tensor_placement import UnloadedNetwork, meta_init, open_checkpoint
from specdecode_worker.models.configs.model_config import dflash_config, read_config
from specdecode_worker.models.networks.dflash import DFlashHead
from specdecode_worker.models.networks.llama import Llama


def prepare_dflash(folder: Path, target: Llama) -> UnloadedNetwork[DFlashHead]:
    """Return the unloaded DFlash head of ``folder`` for ``target``. Raise ModelError if it does not fit."""
    config = dflash_config(read_config(folder), target.config)
    checkpoint = open_checkpoint(folder, lambda name: name.removeprefix("model."))
    with meta_init():
        return UnloadedNetwork(DFlashHead(config, target), checkpoint)


def load_dflash(folder: Path, target: Llama, *, dtype: torch.dtype, device: torch.device) -> DFlashHead:
    """Load the DFlash head in ``folder`` for ``target``. Raise ModelError if it does not fit."""
    return prepare_dflash(folder, target).fill(dtype=dtype, device=device, finite=True)
