"""Fusion of loaded networks for inference. It changes the cost of a network, not the function that it computes.

In bf16 on a CPU with bf16 support, whole blocks are replaced by compiled ones (networks/compiled_cpu.py). Elsewhere,
projections that read the same input become one matrix. On a GPU, layers are replaced too (gpu_blocks.py). On such a CPU
the remaining matrices are packed once: into the panels of the compiled kernels, or, if those cannot be compiled, into
oneDNN's layout. Otherwise oneDNN would reorder a matrix in every call with several rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdecode_worker.models.networks.compiled_cpu import NativeLinear, NativeNorm, run_blocks_natively, runs_natively
from specdecode_worker.models.networks.layers import MLP, Attention, RMSNorm
from specdecode_worker.models.transforms.fused_layers import FusedAttention, FusedMLP
from specdecode_worker.models.transforms.gpu_blocks import use_gpu_blocks


class PackedLinear(nn.Module):
    """Matrix in oneDNN's own layout. The plain matrix is released."""

    def __init__(self, origin: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("packed", torch.ops.mkldnn._reorder_linear_weight(origin.weight.detach(), None))
        self.bias = origin.bias

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return result


def fuse(model: nn.Module) -> None:
    """Fuse the projections of ``model`` and pack its matrices, in place.

    The parameter names of the checkpoint no longer apply afterwards.
    """
    run_blocks_natively(model)
    _join(model)
    use_gpu_blocks(model)
    if _should_pack(model):
        _pack(model)


def _join(model: nn.Module) -> None:
    for name, child in list(model.named_children()):
        if isinstance(child, Attention):
            setattr(model, name, FusedAttention(child))
        elif isinstance(child, MLP):
            setattr(model, name, FusedMLP(child))
        else:
            _join(child)


def _pack(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, NativeLinear(child) if runs_natively(child) else PackedLinear(child))
            elif isinstance(child, RMSNorm) and runs_natively(child):
                setattr(module, name, NativeNorm(child))


def should_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether matrices of this dtype on this device should be packed.

    True for bf16 on a CPU with oneDNN and native bf16 support. Elsewhere plain matrices are as fast.
    """
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    ops = torch.ops.mkldnn
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(ops, "_linear_pointwise") and bool(ops._is_mkldnn_bf16_supported())


def _should_pack(model: nn.Module) -> bool:
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    return bool(weights) and all(should_pack(weight.dtype, weight.device) for weight in weights)
