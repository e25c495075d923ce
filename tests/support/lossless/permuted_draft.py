"""Draft model with real weights whose tokenizer has the target's tokens under other ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_EMBEDDING = "model.embed_tokens.weight"


def write_permuted_draft(
    folder: Path,
    origin: Path,
    *,
    layers: range,
    seed: int | None,
    lacks: Callable[[int, str], bool] = lambda index, token: False,
    foreign: int = 0,
) -> Path:
    """Write a copy of the tied model in ``origin`` with another vocabulary.

    Args:
        folder: Folder of the draft.
        origin: Folder of the model.
        layers: Layers that are left out.
        seed: Seed of the permutation of the ids; None keeps their order.
        lacks: Function of an id and its token that tells which tokens are left out. Their merges go with them.
        foreign: Number of tokens that the origin does not have, with random rows.
    """
    document = json.loads((origin / "tokenizer.json").read_text())
    special = {entry["content"] for entry in document["added_tokens"]}
    old = {token: i for token, i in document["model"]["vocab"].items() if token in special or not lacks(i, token)}
    tokens = [*old, *(f"foreign token {i}" for i in range(foreign))]
    generator = torch.Generator().manual_seed(seed or 0)
    order = torch.arange(len(tokens)) if seed is None else torch.randperm(len(tokens), generator=generator)
    new = {token: int(i) for token, i in zip(tokens, order, strict=True)}
    document["model"]["vocab"] = new
    document["model"]["merges"] = [
        merge for merge in document["model"]["merges"] if {*merge, "".join(merge)} <= new.keys()
    ]
    for entry in document["added_tokens"]:
        entry["id"] = new[entry["content"]]
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(document))
    tensors = load_file(origin / "model.safetensors")
    matrix = tensors.pop(_EMBEDDING)
    rows = 0.1 * torch.randn(len(tokens), matrix.shape[1], generator=generator).to(matrix.dtype)
    rows[[new[token] for token in old]] = matrix[list(old.values())]
    config = json.loads((origin / "config.json").read_text())
    remaining = [layer for layer in range(config["num_hidden_layers"]) if layer not in layers]
    renamed = {f"model.layers.{layer}.": f"model.layers.{i}." for i, layer in enumerate(remaining)}
    out = {_EMBEDDING: rows, "model.norm.weight": tensors["model.norm.weight"]}
    for name, tensor in tensors.items():
        prefix = name[: name.find(".", len("model.layers.")) + 1]
        if prefix in renamed:
            out[renamed[prefix] + name.removeprefix(prefix)] = tensor
    save_file(out, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": len(remaining), "vocab_size": len(tokens), "eos_token_id": 0})
    )
    return folder
