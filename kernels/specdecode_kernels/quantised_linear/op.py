"""Products with quantised weights, as models call them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_kernels import dispatch
from specdecode_kernels.quantised_linear import reference
from specdecode_kernels.quantised_linear.reference import Quantised


def linear(x_TK: Tensor, weight: Quantised, bias_N: Tensor | None = None) -> Tensor:
    """As reference.linear. With many rows (prompts) arithmetic counts and not what is read: then the matrix is made
    once more in x's type, and multiplied as any other."""
    if not dispatch.on_gpu(x_TK) or x_TK.dtype == torch.float64:
        return reference.linear(x_TK, weight, bias_N)
    from specdecode_kernels.quantised_linear import kernel

    if x_TK.shape[0] > kernel.MOST_ROWS:
        return F.linear(x_TK, reference.dequantise(weight, x_TK.dtype), bias_N)
    return kernel.linear(x_TK, weight, bias_N)
