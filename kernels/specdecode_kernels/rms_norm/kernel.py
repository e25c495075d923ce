"""Residual sum and RMS norm on a GPU: a program reads its row once and writes both results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.dependent import options, release, wait


@triton.jit
def normed(x_E, weight_E, eps, size):
    """Return the RMS norm of a row in fp32; elements from ``size`` on must be zero."""
    return x_E * tl.math.rsqrt(tl.sum(x_E * x_E, 0) / size + eps) * weight_E


@triton.jit
def _rms_norm_kernel(
    x_TE,
    residual_TE,
    weight_E,
    normed_TE,
    summed_TE,
    size,
    x_stride,
    residual_stride,
    eps,
    RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Compute the residual sum (if RESIDUAL) and the norm of one row."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    inside = e < size
    weight = tl.load(weight_E + e, mask=inside, other=0.0).to(tl.float32)
    wait(DEPENDENT)
    release(DEPENDENT)
    x_E = tl.load(x_TE + row * x_stride + e, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        x_E += tl.load(residual_TE + row * residual_stride + e, mask=inside, other=0.0).to(tl.float32)
        rounded_E = x_E.to(summed_TE.dtype.element_ty)
        tl.store(summed_TE + row * size + e, rounded_E, mask=inside)
        x_E = rounded_E.to(tl.float32)
    out_E = normed(x_E, weight, eps, size)
    tl.store(normed_TE + row * size + e, out_E.to(normed_TE.dtype.element_ty), mask=inside)


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (normed, summed), newly made tensors contiguous. Rows must be contiguous."""
    rows, size = x_TE.shape
    assert x_TE.stride(1) == 1, "rows must be contiguous"
    assert residual_TE is None or residual_TE.stride(1) == 1, "rows must be contiguous"
    normed_TE = torch.empty(rows, size, dtype=x_TE.dtype, device=x_TE.device)
    summed_TE = x_TE if residual_TE is None else torch.empty(rows, size, dtype=x_TE.dtype, device=x_TE.device)
    if rows:
        block = triton.next_power_of_2(size)
        _rms_norm_kernel[(rows,)](
            x_TE,
            x_TE if residual_TE is None else residual_TE,
            weight_E,
            normed_TE,
            summed_TE,
            size,
            x_TE.stride(0),
            0 if residual_TE is None else residual_TE.stride(0),
            eps,
            RESIDUAL=residual_TE is not None,
            BLOCK_E=block,
            num_warps=max(min(block // 512, 8), 1),
            **options(x_TE),
        )
    return normed_TE, summed_TE
