"""Strict loading from safetensors: a missing, extra or misshapen tensor is an error that names it.

No pickle, no remote code. Renames of the known families of EAGLE-3 heads happen here and nowhere else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from specdecode_worker.models.config import eagle3_config, llama_config, read_config
from specdecode_worker.models.eagle3 import Eagle3Head
from specdecode_worker.models.errors import WeightMismatch
from specdecode_worker.models.llama import Llama

# How the families of published EAGLE-3 heads name the one decoder layer (SafeAILab, speculators, NeMo).
_LAYER_PREFIXES = ("midlayer.", "layers.0.", "model.layers.0.")


def load_llama(folder: Path, *, dtype: torch.dtype, device: torch.device) -> Llama:
    """The target in ``folder``. Raises ConfigMismatch, WeightMismatch."""
    config = llama_config(read_config(folder))
    with torch.device("meta"):
        model = Llama(config)
    tensors = dict(_tensors(folder))
    if config.tie_word_embeddings:
        # A tied checkpoint may or may not repeat the matrix; the embedding is the one that counts.
        tensors["lm_head.weight"] = tensors.get("model.embed_tokens.weight", torch.empty(0))
    _fill(model, tensors, folder, dtype, device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def load_eagle3(folder: Path, target: Llama, *, dtype: torch.dtype, device: torch.device) -> Eagle3Head:
    """The head in ``folder`` for ``target``. Raises ConfigMismatch, WeightMismatch."""
    config = eagle3_config(read_config(folder), target.config)
    tensors = {_eagle3_name(name): tensor for name, tensor in _tensors(folder)}
    with torch.device("meta"):
        embedding = target.model.embed_tokens
        if "embed_tokens.weight" in tensors:
            embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        head = Eagle3Head(config, embedding)
    if (own := tensors.pop("embed_tokens.weight", None)) is not None:
        _expect_shape(folder, "embed_tokens.weight", own, embedding.weight)
        embedding.weight = nn.Parameter(own.to(device=device, dtype=dtype), requires_grad=False)
    elif config.hidden_size != target.config.hidden_size:
        raise WeightMismatch(
            f"{folder}: embed_tokens.weight is missing; a head of hidden_size {config.hidden_size} cannot use the "
            f"target's embeddings of size {target.config.hidden_size}"
        )
    # t2d says the same as d2t; both are absent when the vocabularies are equal.
    tensors.pop("t2d", None)
    if config.draft_vocab_size == config.vocab_size:
        tensors.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    _fill(head, tensors, folder, dtype, device)
    if not _maps_into(head.target_ids, config.vocab_size):
        raise WeightMismatch(f"{folder}: d2t maps outside the target's vocabulary of {config.vocab_size}")
    return head


def weights_hash(folder: Path) -> str:
    """Hash over config.json and every safetensors file: the identity of a target or a draft in plans and reports."""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise WeightMismatch(f"{folder} holds no *.safetensors; other formats are not read, convert them first")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safe_open is no dict
                    if not name.endswith("inv_freq"):  # derived from config.json, stored by old exporters
                        yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightMismatch(f"{path} cannot be read as safetensors: {error}") from None


def _eagle3_name(name: str) -> str:
    for prefix in _LAYER_PREFIXES[1:]:
        if name.startswith(prefix):
            return _LAYER_PREFIXES[0] + name.removeprefix(prefix)
    return name.removeprefix("model.")


def _fill(
    module: nn.Module, tensors: dict[str, Tensor], folder: Path, dtype: torch.dtype, device: torch.device
) -> None:
    """Puts ``tensors`` into ``module`` (built on the meta device), by name, all of them and no others."""
    wanted = module.state_dict()
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise WeightMismatch(f"{folder}: {missing[0]} is missing ({len(missing)} missing in all)")
    if extra := sorted(tensors.keys() - wanted.keys()):
        raise WeightMismatch(f"{folder}: {extra[0]} is not part of this model ({len(extra)} extra in all)")
    for name, tensor in tensors.items():
        _expect_shape(folder, name, tensor, wanted[name])
    placed = {
        name: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
        for name, tensor in tensors.items()
    }
    module.load_state_dict(placed, assign=True)
    module.requires_grad_(False)
    for child in module.modules():
        if hasattr(child, "cos_PD"):
            child.to(device)


def _expect_shape(folder: Path, name: str, found: Tensor, wanted: Tensor) -> None:
    if found.shape != wanted.shape:
        raise WeightMismatch(
            f"{folder}: {name} has shape {list(found.shape)}, config.json asks for {list(wanted.shape)}"
        )
    if found.is_floating_point() != wanted.is_floating_point():
        raise WeightMismatch(f"{folder}: {name} has dtype {found.dtype}, expected {wanted.dtype}")


def _maps_into(ids: Tensor, size: int) -> bool:
    return bool(((ids >= 0) & (ids < size)).all())
