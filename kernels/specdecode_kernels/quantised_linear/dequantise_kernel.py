"""Dequantisation of a whole matrix on a GPU, in one launch, for products that are bound by arithmetic."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.quantised_linear.kernel import _int4, _levels, _zeros, is_grouped
from specdecode_kernels.quantised_linear.reference import Quantised

_BLOCK_K = 512
"""Inputs of a program if a row has one scale; else it takes one group."""
_WEIGHTS = 4096
"""Weights of a program."""


@triton.jit
def _dequantise_kernel(
    packed_NB,
    scale_NG,
    zero_NG,
    out_NK,
    outputs,
    columns,
    packed_stride,
    groups,
    INT4: tl.constexpr,
    GROUPED: tl.constexpr,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Dequantise BLOCK_N rows of one group of inputs, or of BLOCK_B inputs if a row has one scale."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(1)
    b = tl.arange(0, BLOCK_B)
    real = n < outputs
    row_N = n.to(tl.int64)
    dtype: tl.constexpr = out_NK.dtype.element_ty
    at_NB = row_N[:, None] * packed_stride + group * BLOCK_B + b[None, :]
    at_N = row_N * groups + group if GROUPED else row_N
    scale_N = tl.load(scale_NG + at_N, mask=real, other=0.0).to(tl.float32)
    if INT4:
        zero_N1 = _zeros(zero_NG, at_N, real, ZERO)
        bytes_NB = tl.load(packed_NB + at_NB, mask=real[:, None], other=0)
        low, high = group * 2 * BLOCK_B + b, group * 2 * BLOCK_B + BLOCK_B + b
        place_N = out_NK + row_N[:, None] * columns
        low_NB = _int4(bytes_NB & 15, zero_N1, tl.float32) * scale_N[:, None]
        high_NB = _int4(bytes_NB >> 4, zero_N1, tl.float32) * scale_N[:, None]
        tl.store(place_N + low[None, :], low_NB.to(dtype), mask=real[:, None] & (low < columns)[None, :])
        tl.store(place_N + high[None, :], high_NB.to(dtype), mask=real[:, None] & (high < columns)[None, :])
    else:
        k = group * BLOCK_B + b
        inside = real[:, None] & (k < columns)[None, :]
        w_NB = tl.load(packed_NB + at_NB, mask=inside, other=0.0)
        w_NB = _levels(w_NB, tl.float32, BITS) * scale_N[:, None]
        tl.store(out_NK + row_N[:, None] * columns + k[None, :], w_NB.to(dtype), mask=inside)


def dequantise(weight: Quantised, dtype: torch.dtype) -> Tensor:
    """Return the matrix [N, K] in ``dtype``, rounded once, as `reference.dequantise` does."""
    int4, grouped = weight.kind == "int4", is_grouped(weight)
    # GPUs that know no fp8 get the bits.
    bits = weight.kind == "fp8" and not dispatch.has_fp8(weight.packed_NB)
    packed_NB = weight.packed_NB.view(torch.uint8) if bits else weight.packed_NB
    block_k = weight.group if grouped else _BLOCK_K
    groups = triton.cdiv(weight.columns, block_k)
    block_n = _WEIGHTS // block_k
    out_NK = torch.empty(weight.rows, weight.columns, dtype=dtype, device=weight.packed_NB.device)
    _dequantise_kernel[(triton.cdiv(weight.rows, block_n), groups)](
        packed_NB,
        weight.scale_NG,
        packed_NB if weight.zero_NG is None else weight.zero_NG,
        out_NK,
        weight.rows,
        weight.columns,
        packed_NB.stride(0),
        groups,
        INT4=int4,
        GROUPED=grouped,
        ZERO=weight.zero_NG is not None,
        BITS=bits,
        BLOCK_N=block_n,
        BLOCK_B=block_k // 2 if int4 else block_k,
        num_warps=4,
    )
    return out_NK
