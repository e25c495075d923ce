"""Reference implementation of residual sum and RMS norm in plain PyTorch.

Tensor suffixes: T rows, E columns.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (normed, summed).

    ``summed`` is x + residual rounded to x's type, or x itself without a residual. ``normed`` is summed /
    sqrt(mean(summed^2) + eps) * weight, computed in fp32 at least.
    """
    summed_TE = x_TE if residual_TE is None else x_TE + residual_TE
    return F.rms_norm(summed_TE, (summed_TE.shape[-1],), weight_E, eps), summed_TE
