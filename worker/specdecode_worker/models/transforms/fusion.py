"""Fusion of loaded networks for inference. It changes the cost of a network, not the function that it computes.

In bf16 on a CPU with bf16 support, whole blocks are replaced by compiled ones (networks/compiled_cpu.py). Elsewhere,
projections that read the same input become one matrix. On a GPU, layers are replaced too (gpu_blocks.py). On such a CPU
the remaining matrices are packed once: into the panels of the compiled kernels, or, if those cannot be compiled, into
oneDNN's layout. Otherwise oneDNN would reorder a matrix in every call with several rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdecode_kernels.silu_mul.op import silu_mul
from specdecode_worker.models.networks.compiled_cpu import (
    NativeLinear,
    NativeNorm,
    joined_norm,
    run_blocks_natively,
    runs_natively,
)
from specdecode_worker.models.networks.layers import MLP, Attend, Attention, RMSNorm, RotatingAttend
from specdecode_worker.models.networks.rope import PassRotations
from specdecode_worker.models.transforms.gpu_blocks import use_gpu_blocks
from specdecode_worker.models.transforms.quantization import QuantisedLinear


class FusedAttention(nn.Module):
    """Attention with one matrix for queries, keys and values.

    Queries and keys are normed and rotated together.
    """

    norm_HD: Tensor | None

    def __init__(self, origin: Attention) -> None:
        super().__init__()
        self.head_dim = origin.head_dim
        self.queries = origin.q_proj.out_features // origin.head_dim
        self.keys = origin.k_proj.out_features // origin.head_dim
        self.qkv_proj = _joined(origin.q_proj, origin.k_proj, origin.v_proj)
        self.o_proj = origin.o_proj
        self.register_buffer("norm_HD", joined_norm(origin, self.queries, self.keys))
        self.eps = origin.q_norm.eps if origin.q_norm is not None else 0.0

    def forward(self, layer: int, x_TE: Tensor, rope: PassRotations, attend: Attend) -> Tensor:
        result: Tensor = self.o_proj(self.attended(layer, self.qkv_proj(x_TE), rope, attend))
        return result

    def attended(self, layer: int, projected: Tensor, rope: PassRotations, attend: Attend) -> Tensor:
        """Return the attended values [T, H * D] of the output of ``qkv_proj``."""
        heads_THD = projected.reshape(*projected.shape[:-1], -1, self.head_dim)
        v_TKD = heads_THD[:, self.queries + self.keys :]
        turning_THD = heads_THD[:, : self.queries + self.keys]
        if self.norm_HD is not None:
            turning_THD = F.rms_norm(turning_THD, (self.head_dim,), None, self.eps) * self.norm_HD
        if isinstance(attend, RotatingAttend):
            q_THD, k_TKD = turning_THD[:, : self.queries], turning_THD[:, self.queries :]
            out_THD = attend.rotate_and_attend(layer, q_THD, k_TKD, v_TKD, rope)
        else:
            turned_THD = rope.rotate(turning_THD)
            out_THD = attend(layer, turned_THD[:, : self.queries], turned_THD[:, self.queries :], v_TKD)
        return out_THD.flatten(-2)


class FusedMLP(nn.Module):
    """MLP with one matrix for gate and up."""

    def __init__(self, origin: MLP) -> None:
        super().__init__()
        self.gate_up_proj = _joined(origin.gate_proj, origin.up_proj)
        self.down_proj = origin.down_proj

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(silu_mul(self.gate_up_proj(x)))
        return result


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


def _joined(*parts: nn.Module) -> nn.Module:
    """Return one matrix for several projections that read the same input."""
    quantised = tuple(part for part in parts if isinstance(part, QuantisedLinear))
    if len(quantised) == len(parts):
        return QuantisedLinear.joined(quantised)
    assert not quantised, "projections that are joined are quantised alike"
    return _joined_plainly(*(part for part in parts if isinstance(part, nn.Linear)))


def _joined_plainly(*parts: nn.Linear) -> nn.Linear:
    weight = torch.cat([part.weight.detach() for part in parts])
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts)), "projections that are joined all have a bias, or none has"
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined
