"""Dequantisation of a whole matrix on a GPU, in one launch, for products that are bound by arithmetic."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.quantised_linear.kernel import _high, _levels, _low
from specdecode_kernels.quantised_linear.reference import Quantised

_BLOCK_K = 512
"""Inputs of a program for int8 and fp8; int4 takes one group."""
_WEIGHTS = 4096
"""Weights of a program."""


@triton.jit
def _dequantise_kernel(
    packed_NB,
    scale_NG,
    out_NK,
    outputs,
    columns,
    packed_stride,
    groups,
    INT4: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Dequantise BLOCK_N rows of one group of inputs (int4), or of BLOCK_B inputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(1)
    b = tl.arange(0, BLOCK_B)
    real = n < outputs
    row_N = n.to(tl.int64)
    dtype: tl.constexpr = out_NK.dtype.element_ty
    at_NB = row_N[:, None] * packed_stride + group * BLOCK_B + b[None, :]
    if INT4:
        scale_N = tl.load(scale_NG + row_N * groups + group, mask=real, other=0.0).to(tl.float32)
        bytes_NB = tl.load(packed_NB + at_NB, mask=real[:, None], other=0)
        low, high = group * 2 * BLOCK_B + b, group * 2 * BLOCK_B + BLOCK_B + b
        place_N = out_NK + row_N[:, None] * columns
        low_NB = _low(bytes_NB, tl.float32) * scale_N[:, None]
        high_NB = _high(bytes_NB, tl.float32) * scale_N[:, None]
        tl.store(place_N + low[None, :], low_NB.to(dtype), mask=real[:, None] & (low < columns)[None, :])
        tl.store(place_N + high[None, :], high_NB.to(dtype), mask=real[:, None] & (high < columns)[None, :])
    else:
        k = group * BLOCK_B + b
        inside = real[:, None] & (k < columns)[None, :]
        w_NB = tl.load(packed_NB + at_NB, mask=inside, other=0.0)
        scale_N = tl.load(scale_NG + n, mask=real, other=0.0)
        w_NB = _levels(w_NB, tl.float32, BITS) * scale_N[:, None]
        tl.store(out_NK + row_N[:, None] * columns + k[None, :], w_NB.to(dtype), mask=inside)


def dequantise(weight: Quantised, dtype: torch.dtype) -> Tensor:
    """Return the matrix [N, K] in ``dtype``, rounded once, as `reference.dequantise` does."""
    int4 = weight.kind == "int4"
    # GPUs that know no fp8 get the bits.
    bits = weight.kind == "fp8" and not dispatch.has_fp8(weight.packed_NB)
    block_b = weight.group // 2 if int4 else _BLOCK_K
    groups = triton.cdiv(weight.columns, weight.group if int4 else _BLOCK_K)
    block_n = _WEIGHTS // (2 * block_b if int4 else block_b)
    out_NK = torch.empty(weight.rows, weight.columns, dtype=dtype, device=weight.packed_NB.device)
    _dequantise_kernel[(triton.cdiv(weight.rows, block_n), groups)](
        weight.packed_NB.view(torch.uint8) if bits else weight.packed_NB,
        weight.scale_NG,
        out_NK,
        weight.rows,
        weight.columns,
        weight.packed_NB.stride(0),
        groups,
        INT4=int4,
        BITS=bits,
        BLOCK_N=block_n,
        BLOCK_B=block_b,
        num_warps=4,
    )
    return out_NK
