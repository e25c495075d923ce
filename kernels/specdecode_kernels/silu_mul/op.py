"""Gated activation SiLU(gate) * up, as models call it."""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.silu_mul import reference


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """Compute SiLU(gate) * up over the last dimension as `reference.silu_mul` does, with any leading dimensions."""
    if not dispatch.on_gpu(gate_up_T2F) or gate_up_T2F.dtype == torch.float64 or dispatch.learns(gate_up_T2F):
        return reference.silu_mul(gate_up_T2F)
    from specdecode_kernels.silu_mul import kernel

    return kernel.silu_mul(gate_up_T2F.flatten(0, -2)).view(*gate_up_T2F.shape[:-1], -1)
