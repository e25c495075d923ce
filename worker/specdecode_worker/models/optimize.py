"""What is done with a loaded network before it serves. It changes the cost of a network, not its function.

`quantise_target` and `quantise_draft` round weights to fewer bits, which is a function of its own: for a target, all
matrices of its blocks, as in vLLM, but neither embeddings nor lm_head; for a draft, the MLPs and its own lm_head, which
are most of its weights. With int4 the lm_head of a draft is int8: four bits for it cost more acceptance than four bits
for all MLPs. On a GPU, weights are stored and multiplied in quantized form. On a CPU, they are dequantized at once,
because its matrices have their own layouts: the values are the same, but no memory or time is saved.

`fuse` joins projections that read the same input. In bf16 on a CPU with bf16 support, whole blocks are replaced by
compiled ones (`compiled_cpu`), and the remaining matrices are packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from specdecode_kernels.quantised_linear.reference import Kind, stored_bytes
from specdecode_worker.models.causal_lm import MLP, Attention, CausalLM, Experts
from specdecode_worker.models.compiled_cpu import run_blocks_natively, run_norms_natively
from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.linear import Linear, Split

_FP8 = (8, 9)
"""Lowest compute capability of a GPU that converts e4m3."""


def quantise_target(model: CausalLM, kind: Kind | None, device: torch.device, *, stored: bool | None = None) -> None:
    """Quantize the target and move it to ``device``.

    The model moves matrix by matrix, so the device never holds all of it in its original dtype. ``stored`` keeps the
    weights in quantized form; None does so on a GPU only.

    Raises:
        ConfigMismatch: the GPU does not support the format.
    """
    _quantise(_of_target(model), kind, device, stored)
    if kind:
        model.form = f"{kind}, rounded at load"
    model.to(device)


def quantise_draft(model: nn.Module, kind: Kind | None, *, stored: bool | None = None) -> None:
    """Quantize the draft on the device that holds it; otherwise as `quantise_target`."""
    device = next(model.parameters()).device
    _quantise(_of_draft(model), kind, device, stored)


def added_bytes(model: nn.Module, kind: Kind | None, dtype: torch.dtype, device: torch.device, *, draft: bool) -> int:
    """Return the bytes that quantization adds to the weights of a network in ``dtype``; mostly negative.

    The network is on the meta device. Its checkpoint may be quantized, or ``kind`` may ask for it.

    Raises:
        ConfigMismatch: The experts of a layer are stored in several formats, whose kernel reads one.
    """
    if device.type == "cuda":
        for experts in (module for module in model.modules() if isinstance(module, Experts)):
            _refuse_mixed(experts)
    if kind is None:
        linears = (module for module in model.modules() if isinstance(module, Linear))
        return 0 if device.type == "cpu" else -sum(linear.nbytes_saved(dtype) for linear in linears)
    named = {id(parameter): 0 for parameter in model.parameters()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            named[id(parameter)] += 1
    added = 0
    for owner, name in _of_draft(model) if draft else _of_target(cast(CausalLM, model)):
        _refuse_quantized(getattr(owner, name))
        weight: Tensor = getattr(owner, name).weight
        plain = weight.numel() * dtype.itemsize
        stored = plain if device.type == "cpu" else stored_bytes(weight.shape[0], weight.shape[1], _kind(name, kind))
        # a tied matrix also stays in memory under its other name
        added += stored - (plain if named[id(weight)] == 1 else 0)
    return added


def fuse(model: nn.Module) -> None:
    """Join the projections of ``model`` and pack its matrices, in place.

    The parameter names of the checkpoint no longer apply afterwards.
    """
    run_blocks_natively(model)
    for module in list(model.modules()):
        if isinstance(module, (Attention, MLP)):
            module.join()
    for module in model.modules():
        if isinstance(module, Experts):
            module.stack()
    matrices = [module for module in model.modules() if isinstance(module, Linear)]
    if matrices and all(one.stored is None and should_pack(one.weight.dtype, one.weight.device) for one in matrices):
        for one in matrices:
            one.pack()
        run_norms_natively(model)


def should_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether matrices of this dtype on this device should be packed.

    True for bf16 on a CPU with oneDNN and native bf16 support. Elsewhere plain matrices are as fast.
    """
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    ops = torch.ops.mkldnn
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(ops, "_linear_pointwise") and bool(ops._is_mkldnn_bf16_supported())


def _of_target(model: CausalLM) -> Iterator[tuple[nn.Module, str]]:
    for module in model.model.layers.modules():
        for name, child in module.named_children():
            if isinstance(child, Linear) and child.split is not Split.WHOLE:  # a router stays as it is
                yield module, name


def _of_draft(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        if isinstance(module, MLP):
            yield from ((module, name) for name in ("gate_proj", "up_proj", "down_proj"))
    output = getattr(model, "lm_head", None)
    if isinstance(output, Linear) and output.stored is None:  # else the target's, which is packed already
        yield model, "lm_head"


def _refuse_quantized(linear: Linear) -> None:
    """Raise ConfigMismatch for a matrix that is quantized in its checkpoint already."""
    if linear.stored is not None or linear.source is not None:
        raise ConfigMismatch("the checkpoint is quantized already; leave `quantization` out, or take the bf16 model")


def _refuse_mixed(experts: Experts) -> None:
    """Raise ConfigMismatch for experts that the kernel of GPUs cannot read as one matrix above the other."""
    matrices = [(name, one) for name, one in experts.experts.named_modules() if isinstance(one, Linear)]
    for of_down in (False, True):
        forms = {one.form for name, one in matrices if name.endswith("down_proj") == of_down}
        if len(forms) > 1 or any("act-order" in form for form in forms):
            raise ConfigMismatch(
                f"experts stored as {' and '.join(sorted(forms))} are not served on a GPU; "
                "take a checkpoint with one format for all experts of a layer, and without act-order (desc_act)"
            )


def _kind(name: str, kind: Kind) -> Kind:
    return "int8" if (name, kind) == ("lm_head", "int4") else kind


def _quantise(
    places: Iterator[tuple[nn.Module, str]], kind: Kind | None, device: torch.device, stored: bool | None
) -> None:
    if kind is None:
        return
    if kind == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8:
        raise ConfigMismatch(f"quantization fp8 needs compute capability 8.9, which {device} has not; take int8")
    stores = device.type == "cuda" if stored is None else stored
    for owner, name in list(places):
        plain: Linear = getattr(owner, name)
        _refuse_quantized(plain)
        setattr(owner, name, plain.quantize(_kind(name, kind), device, stored=stores))
