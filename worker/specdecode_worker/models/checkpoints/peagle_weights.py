"""Loading of P-EAGLE heads: the tensors of an EAGLE-3 head, and ``mask_hidden``.

speculators stores ``mask_hidden`` as [1, 1, A]; vLLM flattens it (vllm-project/vllm,
vllm/model_executor/models/llama_eagle3.py), so other exporters may store it as [1, A] or [A].
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from specdecode_worker.models.checkpoints.tensor_placement import UnloadedNetwork
from specdecode_worker.models.checkpoints.weights import fill_head, prepare_head
from specdecode_worker.models.configs.model_config import peagle_config, read_config
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.models.networks.peagle import PEagleHead

_MASK = "mask_hidden"


def prepare_peagle(folder: Path, target: Llama) -> UnloadedNetwork[PEagleHead]:
    """Return the unloaded P-EAGLE head of ``folder`` for ``target``. Raise ModelError if it does not fit."""
    prepared = prepare_head(PEagleHead, peagle_config(read_config(folder), target.config), folder, target)
    if _MASK in prepared.checkpoint:
        width = prepared.network.mask_hidden.numel()
        shape = prepared.checkpoint.tensors[_MASK].shape
        if shape in ((width,), (1, width)):
            prepared.network.mask_hidden = nn.Parameter(prepared.network.mask_hidden.view(shape))
    return prepared


def load_peagle(folder: Path, target: Llama, *, dtype: torch.dtype, device: torch.device) -> PEagleHead:
    """Load the P-EAGLE head in ``folder`` for ``target``. Raise ModelError if it does not fit."""
    return fill_head(prepare_peagle(folder, target), target, dtype=dtype, device=device)
