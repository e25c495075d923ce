"""Reference implementation of SiLU(gate) * up in plain PyTorch.

Tensor suffixes: T rows, F columns of each half.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """Return SiLU(gate) * up, [T, F], of [T, 2F] with the gate first; computed in fp32 at least and rounded once."""
    wide = torch.promote_types(gate_up_T2F.dtype, torch.float32)
    gate_TF, up_TF = gate_up_T2F.to(wide).chunk(2, dim=-1)
    return (F.silu(gate_TF) * up_TF).to(gate_up_T2F.dtype)
