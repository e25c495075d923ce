"""Attention and MLP whose projections that read the same input are one matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdecode_kernels.silu_mul.op import silu_mul
from specdecode_worker.models.networks.compiled_cpu import joined_norm
from specdecode_worker.models.networks.layers import MLP, Attend, Attention, RotatingAttend
from specdecode_worker.models.networks.rope import PassRotations
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
        heads_THD = projected.view(len(projected), self.queries + 2 * self.keys, self.head_dim)
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
