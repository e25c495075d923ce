"""Products with quantised weights, as models call them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_kernels import dispatch
from specdecode_kernels.quantised_linear import reference
from specdecode_kernels.quantised_linear.choice import choose
from specdecode_kernels.quantised_linear.reference import Quantised


def linear(x_TK: Tensor, weight: Quantised, bias_N: Tensor | None = None) -> Tensor:
    """Compute x W^T + b as `reference.linear` does. On a GPU, `choice.choose` says how."""
    if not dispatch.on_gpu(x_TK) or x_TK.dtype == torch.float64:
        return reference.linear(x_TK, weight, bias_N)
    if weight.order_K is not None:
        x_TK, weight = x_TK.index_select(1, weight.order_K), replace(weight, order_K=None)
    # the library multiplies fp8 matrices with one scale a row only
    fp8 = dispatch.has_fp8(x_TK) and weight.group >= weight.columns
    way = choose(weight.kind, weight.rows, weight.columns, len(x_TK), x_TK.dtype, fp8=fp8)
    if way == "tile":
        from specdecode_kernels.quantised_linear import kernel

        return kernel.linear(x_TK, weight, bias_N)
    if way == "scaled":
        from specdecode_kernels.quantised_linear import scaled_kernel

        return scaled_kernel.linear(x_TK, weight, bias_N)
    from specdecode_kernels.quantised_linear import dequantise_kernel

    return F.linear(x_TK, dequantise_kernel.dequantise(weight, x_TK.dtype), bias_N)
