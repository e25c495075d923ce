"""Reference implementation of the fused product of few rows in plain PyTorch.

Tensor suffixes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def small_linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    residual_TN: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Return the product in x's type, computed in fp32 at least and rounded once.

    Args:
        x_TK: Input rows.
        weight_NK: Matrix; with ``gated`` its first half are the rows of the gate.
        bias_N: Added to the product.
        residual_TN: Added to the result.
        gated: Return SiLU(first half) * second half, [T, N / 2].
    """
    wide = torch.promote_types(x_TK.dtype, torch.float32)
    y = F.linear(x_TK.to(wide), weight_NK.to(wide), None if bias_N is None else bias_N.to(wide))
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    if residual_TN is not None:
        y = y + residual_TN.to(wide)
    return y.to(x_TK.dtype)
