"""Kinds of drafts that `distill` trains further, with loading by the kind that a folder holds."""

from __future__ import annotations

from pathlib import Path

import torch

from specdecode_worker.contract import Method
from specdecode_worker.models.checkpoints.draft_weights import load_draft
from specdecode_worker.models.checkpoints.safetensors_headers import infer_method, read_tensor_headers
from specdecode_worker.models.networks.dflash import DFlashHead
from specdecode_worker.models.networks.eagle3 import Eagle3Head
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.training.errors import DraftNotTrainable

Distillable = Eagle3Head | DFlashHead
"""Draft that `distill` trains further. A P-EAGLE head is an Eagle3Head."""


def load_distillable(
    folder: Path, target: Llama, target_folder: Path, dtype: torch.dtype, device: torch.device
) -> Distillable:
    """Load the head in ``folder`` for ``target``.

    Raises:
        DraftNotTrainable: The folder holds a draft of a kind that is not distilled.
        ModelError: The head cannot be loaded, or does not fit the target.
    """
    method = method_in(folder)
    if method != "eagle3" and method != "peagle" and method != "dflash":
        raise DraftNotTrainable(
            f"{folder} holds a draft of method {method}; eagle3, peagle and dflash are distilled, others are trained "
            "further with `train --draft`"
        )
    draft = load_draft(method, folder, target, target_folder=target_folder, dtype=dtype, device=device)
    assert isinstance(draft, Eagle3Head | DFlashHead)
    return draft


def method_in(folder: Path) -> Method:
    """Return the method of the draft in ``folder``, or eagle3 if it holds no known draft; loading then says so."""
    return infer_method(read_tensor_headers(folder)) or "eagle3"
