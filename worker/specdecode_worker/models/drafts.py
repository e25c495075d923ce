"""Loading of a draft of any method for a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specdecode_worker.contract import Method
from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.dflash import DFlashHead
from specdecode_worker.models.eagle import Eagle3Head, EagleHead, PEagleHead
from specdecode_worker.models.errors import ConfigMismatch, WeightMismatch
from specdecode_worker.models.fields import read_config
from specdecode_worker.models.headers import infer_method, read_tensor_headers
from specdecode_worker.models.medusa import MedusaHeads
from specdecode_worker.models.unloaded import UnloadedNetwork
from specdecode_worker.models.vocabulary import TOKENIZER_FILE, expect_same_ordinary_tokens
from specdecode_worker.models.weights import (
    fill_causal_lm,
    load_head,
    prepare_causal_lm,
    prepare_dflash,
    prepare_eagle,
    prepare_eagle3,
    prepare_medusa,
    prepare_peagle,
)

# Fit of a draft's vocabulary to that of its target.
#
# A draft reads and proposes the target's token ids. Added tokens may differ, which costs proposals alone. The matrices
# may have different sizes, since published models pad them differently; `fit_vocabulary` makes them equal.


def expect_vocabulary(method: Method, folder: Path, target_folder: Path) -> None:
    """Raise VocabularyMismatch if ``folder`` holds a draft with the tokenizer of another target.

    Most heads come without a tokenizer. They are checked by the shapes of their matrices alone.
    """
    if method == "draft-model" or (folder / TOKENIZER_FILE).is_file():
        expect_same_ordinary_tokens(target_folder, folder)


def expect_draft_model(folder: Path, max_model_len: int | None) -> None:
    """Raise ConfigMismatch if the model in ``folder`` cannot be a draft model. No weights are read."""
    config = causal_lm_config(read_config(folder), max_model_len)
    if config.layer_kinds:
        raise ConfigMismatch(f"{folder}: {config.architecture} is served as a target, not as a draft model")


@torch.no_grad()
def fit_vocabulary(draft: CausalLM, size: int) -> None:
    """Resize the draft's embedding and lm_head to ``size`` rows, in place.

    Padding rows at the end are cut, or added as zeros. Target and draft can then exchange any token id; the added ids
    belong to no token.
    """
    if draft.config.vocab_size == size:
        return
    embedding, output = draft.model.embed_tokens, draft.lm_head
    tied = output.weight is embedding.weight
    embedding.weight = _resized(embedding.weight, size)
    output.weight = embedding.weight if tied else _resized(output.weight, size)
    embedding.num_embeddings = output.out_features = size
    draft.config = replace(draft.config, vocab_size=size)


def _resized(weight: Tensor, size: int) -> nn.Parameter:
    resized = weight.new_zeros(size, weight.shape[1])
    common_rows = min(size, len(weight))
    resized[:common_rows] = weight[:common_rows]
    return nn.Parameter(resized, requires_grad=False)


# Entry points that load or check a draft with weights, by its method.
#
# A folder with a draft of another method is refused with a message that names the method found.

WeightMethod = Literal["eagle3", "peagle", "dflash", "eagle", "medusa", "draft-model"]
"""Methods with draft weights."""
Draft = Eagle3Head | PEagleHead | DFlashHead | EagleHead | MedusaHeads | CausalLM


@dataclass(frozen=True, slots=True)
class HeadKind:
    """Kind of draft head: how its folder is checked before it is loaded.

    ``prepare`` takes the folder and the target. With ``uses_target_output`` the head computes logits with the target's
    output matrix.
    """

    called: str
    prepare: Callable[[Path, CausalLM], UnloadedNetwork[Any]]
    uses_target_output: bool = False


HEADS: dict[Method, HeadKind] = {
    "eagle3": HeadKind("an EAGLE-3 head", prepare_eagle3),
    "peagle": HeadKind("a P-EAGLE head", prepare_peagle),
    "dflash": HeadKind("a DFlash head", prepare_dflash, uses_target_output=True),
    "eagle": HeadKind("an EAGLE-1 or EAGLE-2 head", prepare_eagle, uses_target_output=True),
    "medusa": HeadKind("a Medusa checkpoint", prepare_medusa),
}
"""Draft heads by method. A draft of another method with weights is a model of its own."""


def load_draft(
    method: Method,
    folder: Path,
    target: CausalLM,
    *,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
) -> Draft:
    """Load the draft in ``folder`` for ``target``, unfused.

    ``target`` may be fused; it was loaded from ``target_folder``. A draft model is resized to the target's vocabulary.
    Its config keeps its own maximum length.

    Raises:
        ConfigMismatch: config.json is unsupported, or made for a target of another shape.
        WeightMismatch: the tensors do not fit config.json.
        VocabularyMismatch: the draft has other tokens than the target.
    """
    prepared = _prepared(method, folder, target, target_folder, max_model_len)
    if method in HEADS:
        head: Draft = load_head(prepared, target, dtype=dtype, device=device)
        return head
    draft = fill_causal_lm(prepared, dtype=dtype, device=device, finite=True)
    fit_vocabulary(draft, target.config.vocab_size)
    return draft


def build_meta_draft(
    method: Method, folder: Path, target: CausalLM, *, target_folder: Path, max_model_len: int | None = None
) -> Draft:
    """Return the network that `load_draft` would load, on the meta device, checked without reading weights.

    The checks are of config.json, tokenizers and tensor headers. Raises the errors of `load_draft`, except those about
    the values of weights.
    """
    prepared = _prepared(method, folder, target, target_folder, max_model_len)
    prepared.check()
    draft: Draft = prepared.network
    if isinstance(draft, CausalLM):
        fit_vocabulary(draft, target.config.vocab_size)
    return draft


def _prepared(
    method: Method, folder: Path, target: CausalLM, target_folder: Path, max_model_len: int | None
) -> UnloadedNetwork[Any]:
    expect_method(method, folder)
    expect_vocabulary(method, folder, target_folder)
    if (head := HEADS.get(method)) is not None:
        return head.prepare(folder, target)
    expect_draft_model(folder, max_model_len)
    return prepare_causal_lm(folder, max_model_len=max_model_len)


def expect_method(method: Method, folder: Path) -> None:
    """Raise an error unless ``folder`` holds a draft of ``method``.

    Raises:
        ConfigMismatch: the folder holds a draft of another method.
        WeightMismatch: the folder holds no known draft.
    """
    inferred = infer_method(read_tensor_headers(folder))
    if inferred is None:
        raise WeightMismatch(f"{folder} holds no draft that is known: neither a head's nor a model's tensors are there")
    if inferred != method:
        called = HEADS[inferred].called if inferred in HEADS else "a whole model"
        missing = "mask_hidden is missing, " if (method, inferred) == ("peagle", "eagle3") else ""
        raise ConfigMismatch(f"{folder}: {missing}this is {called}, set method: {inferred} (it is {method})")
