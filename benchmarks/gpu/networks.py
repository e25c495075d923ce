"""Random networks of real shapes whose every draft is right: the synthetic knob can then set any acceptance.

The first number of every state is large and stays so (embeddings put it there, layers add little), and one row of the
head reads it: so target and draft always agree on one token, and a step costs what any other step costs.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from shapes import Shapes
from torch import Tensor, nn

from specdecode_worker.models.arch import causal_lm_config, new_network
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import eagle3_config
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.models.linear import Linear, Split
from specdecode_worker.models.unloaded import meta_init, place_tables

ANSWER = 7
_LOUD = 1000.0
_STD = 0.02


def random_target(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Made on the device itself: nothing of it is ever in a file. No token is preferred.

    Matrices that are quantized are made one by one, so that the device never holds them in ``dtype``.
    """
    with meta_init():
        model = new_network(causal_lm_config(shapes.target))
    if shapes.quantization:
        generator = torch.Generator(device).manual_seed(1)
        for owner in list(model.model.layers.modules()):
            for name, child in owner.named_children():
                if isinstance(child, Linear) and child.split is not Split.WHOLE:
                    empty = torch.empty(child.weight.shape, dtype=dtype, device=device)
                    plain = Linear.of(empty.normal_(0, _STD, generator=generator), split=child.split)
                    setattr(owner, name, plain.quantize(shapes.quantization, device, stored=True))
    model.load_state_dict(_random(model, dtype, device), assign=True, strict=False)
    model.requires_grad_(False)
    place_tables(model, device, dtype)
    return model


def make_loud(target: CausalLM) -> None:
    """Make the target prefer one token, by the first number of its states."""
    target.model.embed_tokens.weight[:, 0] = _LOUD
    target.lm_head.weight[ANSWER, 0] = 10


def write_head(shapes: Shapes, target: CausalLM, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """A checkpoint, for the engine's own loader."""
    with meta_init():
        head = Eagle3Head(eagle3_config(shapes.head, target.config), target.model.embed_tokens)
    weights = _random(head, dtype, device)
    weights["fc.weight"][0, 0] = 1
    weights["lm_head.weight"][ANSWER, 0] = 10
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shapes.head))
    save_file({name: tensor.cpu() for name, tensor in weights.items()}, folder / "model.safetensors")


def write_config(shapes: Shapes, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shapes.target))


def _random(model: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Norms are one, matrices without numbers small and random, maps of tokens the identity."""
    generator = torch.Generator(device).manual_seed(0)
    found = {}
    for name, tensor in model.state_dict().items():
        if not tensor.is_meta:
            continue
        if not tensor.is_floating_point():
            found[name] = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        elif tensor.dim() == 1:
            found[name] = torch.ones(tensor.shape, dtype=dtype, device=device)
        else:
            empty = torch.empty(tensor.shape, dtype=dtype, device=device)
            found[name] = empty.normal_(0, _STD, generator=generator)
    return found
