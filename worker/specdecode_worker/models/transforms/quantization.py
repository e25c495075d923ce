"""Weight-only quantization of loaded networks, in place, before they are fused.

For a target, all matrices of its blocks are quantized, as in vLLM; embeddings and lm_head are not. For a draft, the
MLPs and its own lm_head are quantized, which are most of its weights. With int4 the lm_head of a draft is int8: four
bits for it cost more acceptance than four bits for all MLPs (docs/performance.md). On a GPU, weights are stored and
multiplied in quantized form. On a CPU, they are dequantized at once, because its matrices have their own layouts: the
values are the same, but no memory or time is saved.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from specdecode_kernels.quantised_linear.op import linear
from specdecode_kernels.quantised_linear.reference import Kind, Quantised, dequantise, quantise, stored_bytes
from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.networks.layers import MLP, Attention
from specdecode_worker.models.networks.llama import Llama

_FP8 = (8, 9)
"""Lowest compute capability of a GPU that converts e4m3."""


class QuantisedLinear(nn.Module):
    """Matrix of quantized weights. The plain matrix is released."""

    packed: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Quantised, bias: Tensor | None) -> None:
        super().__init__()
        self.kind, self.group = weight.kind, weight.group
        self.in_features, self.out_features = weight.columns, weight.rows
        self.register_buffer("packed", weight.packed_NB)
        self.register_buffer("scale", weight.scale_NG)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        weight = Quantised(self.kind, self.packed, self.scale, self.in_features, self.group)
        return linear(x.reshape(-1, self.in_features), weight, self.bias).reshape(*x.shape[:-1], self.out_features)

    @classmethod
    def joined(cls, parts: tuple[QuantisedLinear, ...]) -> QuantisedLinear:
        """Return one matrix for several that read the same input.

        This is exact, because each row is quantized independently.
        """
        biases = [part.bias for part in parts if part.bias is not None]
        weight = Quantised(
            parts[0].kind,
            torch.cat([part.packed for part in parts]),
            torch.cat([part.scale for part in parts]),
            parts[0].in_features,
            parts[0].group,
        )
        return cls(weight, torch.cat(biases) if biases else None)


def quantise_target(model: Llama, kind: Kind | None, device: torch.device, *, stored: bool | None = None) -> None:
    """Quantize the target and move it to ``device``.

    The model moves matrix by matrix, so the device never holds all of it in its original dtype. ``stored`` keeps the
    weights in quantized form; None does so on a GPU only.

    Raises:
        ConfigMismatch: the GPU does not support the format.
    """
    _quantise(_of_target(model), kind, device, stored)
    model.to(device)


def quantise_draft(model: nn.Module, kind: Kind | None, *, stored: bool | None = None) -> None:
    """Quantize the draft on the device that holds it; otherwise as `quantise_target`."""
    device = next(model.parameters()).device
    _quantise(_of_draft(model), kind, device, stored)


def added_bytes(model: nn.Module, kind: Kind | None, dtype: torch.dtype, device: torch.device, *, draft: bool) -> int:
    """Return the bytes that quantization adds to the weights of a network in ``dtype``; mostly negative.

    The network may be on the meta device.
    """
    if kind is None:
        return 0
    named = {id(parameter): 0 for parameter in model.parameters()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            named[id(parameter)] += 1
    added = 0
    for owner, name in _of_draft(model) if draft else _of_target(model):
        weight: Tensor = getattr(owner, name).weight
        plain = weight.numel() * dtype.itemsize
        stored = plain if device.type == "cpu" else stored_bytes(weight.shape[0], weight.shape[1], _kind(name, kind))
        # a tied matrix also stays in memory under its other name
        added += stored - (plain if named[id(weight)] == 1 else 0)
    return added


def _of_target(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        if isinstance(module, Attention):
            yield from ((module, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        elif isinstance(module, MLP):
            yield from _of_mlp(module)


def _of_draft(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        if isinstance(module, MLP):
            yield from _of_mlp(module)
    if isinstance(getattr(model, "lm_head", None), nn.Linear):
        yield model, "lm_head"


def _kind(name: str, kind: Kind) -> Kind:
    return "int8" if (name, kind) == ("lm_head", "int4") else kind


def _of_mlp(mlp: MLP) -> Iterator[tuple[nn.Module, str]]:
    return ((mlp, name) for name in ("gate_proj", "up_proj", "down_proj"))


def _quantise(
    places: Iterator[tuple[nn.Module, str]], kind: Kind | None, device: torch.device, stored: bool | None
) -> None:
    if kind is None:
        return
    _expect_numbers(kind, device)
    stores = device.type == "cuda" if stored is None else stored
    for owner, name in list(places):
        plain: nn.Linear = getattr(owner, name)
        weight = quantise(plain.weight.to(device), _kind(name, kind))
        setattr(owner, name, QuantisedLinear(weight, plain.bias) if stores else _rounded(plain, weight))


def _rounded(plain: nn.Linear, weight: Quantised) -> nn.Linear:
    """Return a plain matrix with the dequantized values.

    The original tensor is not modified, because embeddings may be tied to it.
    """
    made = nn.Linear(weight.columns, weight.rows, bias=False, device="meta")
    made.weight = nn.Parameter(dequantise(weight, plain.weight.dtype), requires_grad=False)
    made.bias = plain.bias
    return made


def _expect_numbers(kind: Kind, device: torch.device) -> None:
    if kind == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8:
        raise ConfigMismatch(f"quantization fp8 needs compute capability 8.9, which {device} has not; take int8")
