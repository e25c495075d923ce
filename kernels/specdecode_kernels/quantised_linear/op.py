"""Products with quantised weights, as models call them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_kernels import dispatch
from specdecode_kernels.quantised_linear import reference
from specdecode_kernels.quantised_linear.reference import Quantised


def linear(x_TK: Tensor, weight: Quantised, bias_N: Tensor | None = None) -> Tensor:
    """Compute x W^T + b as `reference.linear` does.

    With more than `kernel.MOST_ROWS` rows (prompts) the product is bound by arithmetic and not by reading weights. The
    matrix is then dequantised to x's type and multiplied by the regular linear operation.
    """
    if not dispatch.on_gpu(x_TK) or x_TK.dtype == torch.float64:
        return reference.linear(x_TK, weight, bias_N)
    from specdecode_kernels.quantised_linear import kernel

    if x_TK.shape[0] > kernel.MOST_ROWS:
        return F.linear(x_TK, reference.dequantise(weight, x_TK.dtype), bias_N)
    return kernel.linear(x_TK, weight, bias_N)
