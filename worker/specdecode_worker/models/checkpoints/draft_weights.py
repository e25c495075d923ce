"""The one entry for drafts with weights: by method, and with a word for who confuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from specdecode_worker.contract import Method
from specdecode_worker.models.checkpoints.safetensors_headers import method_of, read_tensor_headers
from specdecode_worker.models.checkpoints.tensor_placement import Network, Prepared
from specdecode_worker.models.checkpoints.vocabulary_check import check_vocabulary, fit_vocabulary
from specdecode_worker.models.checkpoints.weights import (
    load_eagle,
    load_eagle3,
    load_llama,
    load_medusa,
    prepare_eagle,
    prepare_eagle3,
    prepare_llama,
    prepare_medusa,
)
from specdecode_worker.models.errors import ConfigMismatch, WeightMismatch
from specdecode_worker.models.networks.eagle import EagleHead
from specdecode_worker.models.networks.eagle3 import Eagle3Head
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.models.networks.medusa import MedusaHeads

WeightMethod = Literal["eagle3", "eagle", "medusa", "draft-model"]
"""Methods whose drafts have weights."""
Draft = Eagle3Head | EagleHead | MedusaHeads | Llama
_CALLED: dict[Method, str] = {
    "eagle3": "an EAGLE-3 head",
    "eagle": "an EAGLE-1 or EAGLE-2 head",
    "medusa": "a Medusa checkpoint",
    "draft-model": "a whole model",
}


def load_draft(
    method: WeightMethod,
    folder: Path,
    target: Llama,
    *,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
) -> Draft:
    """The draft in ``folder`` for ``target`` (fused or not), which came from ``target_folder``; it is not fused yet.

    A draft model comes with the target's vocabulary size, and with its own longest text in its config. Raises
    ConfigMismatch, WeightMismatch, VocabularyMismatch.
    """
    expect_method(method, folder)
    match method:
        case "eagle3":
            return load_eagle3(folder, target, dtype=dtype, device=device)
        case "eagle":
            return load_eagle(folder, target, dtype=dtype, device=device)
        case "medusa":
            return load_medusa(folder, target, dtype=dtype, device=device)
        case "draft-model":
            check_vocabulary(target_folder, folder)
            draft = load_llama(folder, dtype=dtype, device=device, max_model_len=max_model_len)
            fit_vocabulary(draft, target.config.vocab_size)
            return draft


def check_draft(method: WeightMethod, folder: Path, target_folder: Path, *, max_model_len: int | None = None) -> None:
    """Judges a draft by config.json, tokenizers and tensor headers; reads no weights. Raises as ``load_draft``, for
    all but the values of weights."""
    target = prepare_llama(target_folder, max_model_len=max_model_len).network
    shape_draft(method, folder, target, target_folder=target_folder, max_model_len=max_model_len)


def shape_draft(
    method: WeightMethod, folder: Path, target: Llama, *, target_folder: Path, max_model_len: int | None = None
) -> Draft:
    """What ``load_draft`` would load, on the meta device, once it has been judged as ``check_draft`` judges."""
    expect_method(method, folder)
    match method:
        case "eagle3":
            return _judged(prepare_eagle3(folder, target))
        case "eagle":
            return _judged(prepare_eagle(folder, target))
        case "medusa":
            return _judged(prepare_medusa(folder, target))
        case "draft-model":
            check_vocabulary(target_folder, folder)
            draft = _judged(prepare_llama(folder, max_model_len=max_model_len))
            fit_vocabulary(draft, target.config.vocab_size)
            return draft


def _judged(prepared: Prepared[Network]) -> Network:
    prepared.check()
    return prepared.network


def expect_method(method: WeightMethod, folder: Path) -> None:
    """Raises ConfigMismatch when the folder holds a draft of another method, WeightMismatch when it holds none."""
    found = method_of(read_tensor_headers(folder))
    if found is None:
        raise WeightMismatch(f"{folder} holds no draft that is known: neither a head's nor a model's tensors are there")
    if found != method:
        raise ConfigMismatch(f"{folder}: this is {_CALLED[found]}, set method: {found} (it is {method})")
