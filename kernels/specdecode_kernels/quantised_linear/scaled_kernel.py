"""Products of many rows with fp8 weights on the fp8 matrix units of a GPU, by `torch._scaled_mm`.

Rows of bf16 are split into two fp8 matrices without loss (`reference.split`). Both are multiplied in one call, and a
kernel adds the two sums with their scales. Activations therefore keep all their bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.quantised_linear.choice import fits_scaled
from specdecode_kernels.quantised_linear.kernel import _levels
from specdecode_kernels.quantised_linear.reference import LOW_SCALE, Quantised

SUMS_BYTES = 2**28
"""Memory for the fp32 sums of a call. More rows are multiplied in several calls."""
_BLOCK = 1024


@triton.jit
def _to_fp8(x):
    """Return the bits of fp32 values, rounded to e4m3; 0x7F for what is too large or not a number.

    The exponent of fp32 has 127 - 7 more steps below 1 than that of e4m3, so after a division by 2^120 the upper bits
    of an fp32 number are those of e4m3, also where both are subnormal.
    """
    bits = (x * 7.52316384526264e-37).to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x7F << 20)
    rounded = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    return rounded | ((bits >> 24) & 0x80)


@triton.jit(do_not_specialize=["rows"])
def _split_kernel(x_TK, parts_2TK, scale_T, one, rows, columns, x_stride, LOW: tl.constexpr, BLOCK_K: tl.constexpr):
    """Split one row. The first program also writes ``one``, the scale that the library is given."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    row = x_TK + t * x_stride
    most_K = tl.zeros((BLOCK_K,), tl.float32)
    for start in tl.range(0, columns, BLOCK_K):
        x_K = tl.load(row + start + k, mask=start + k < columns, other=0.0).to(tl.float32)
        most_K = tl.maximum(most_K, tl.abs(x_K))
    # The exponent of the largest value; scales are powers of 2, so that dividing by them is exact.
    exponent = (tl.max(most_K, 0).to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, -100), 120)
    inverse = ((134 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(scale_T + t, ((exponent + 120) << 23).to(tl.float32, bitcast=True))
    if t == 0:
        tl.store(one, 1.0)
    for start in tl.range(0, columns, BLOCK_K):
        inside = start + k < columns
        x_K = tl.load(row + start + k, mask=inside, other=0.0).to(tl.float32) * inverse
        high_K = _to_fp8(x_K)
        low_K = _to_fp8((x_K - _levels(high_K, tl.float32, True)) * LOW)
        place = parts_2TK + t * columns + start + k
        tl.store(place, high_K.to(tl.uint8), mask=inside)
        tl.store(place + rows.to(tl.int64) * columns, low_K.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _merge_kernel(
    sums_2TN,
    scale_T,
    scale_N,
    bias_N,
    out_TN,
    rows,
    outputs,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the sums of both parts of one row, apply the scales of row and outputs, and round once."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = n < outputs
    high_N = tl.load(sums_2TN + t * outputs + n, mask=real, other=0.0)
    low_N = tl.load(sums_2TN + (t + rows) * outputs + n, mask=real, other=0.0)
    out_N = (high_N + low_N * (1 / LOW)) * tl.load(scale_T + t) * tl.load(scale_N + n, mask=real, other=0.0)
    if BIAS:
        out_N += tl.load(bias_N + n, mask=real, other=0.0).to(tl.float32)
    tl.store(out_TN + t * outputs + n, out_N.to(out_TN.dtype.element_ty), mask=real)


def linear(x_TK: Tensor, weight: Quantised, bias_N: Tensor | None = None) -> Tensor:
    """Return x W^T + b, [T, N], for fp8 weights and rows of bf16 that `choice.fits_scaled` accepts."""
    assert weight.kind == "fp8", "the weights are fp8"
    assert fits_scaled(weight.rows, weight.columns, x_TK.dtype), "sizes are multiples of 16, and rows are bf16"
    assert x_TK.stride(1) == 1, "rows must be contiguous"
    out_TN = x_TK.new_empty(len(x_TK), weight.rows)
    at_once = max(SUMS_BYTES // (8 * weight.rows), 1)
    for begin in range(0, len(x_TK), at_once):
        multiply(x_TK[begin : begin + at_once], weight, bias_N, out_TN[begin : begin + at_once])
    return out_TN


def split(x_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``reference.split`` with both parts in one tensor [2 T, K], the scales [T], and a tensor that holds 1."""
    rows, columns = x_TK.shape
    parts_2TK = torch.empty(2 * rows, columns, dtype=torch.uint8, device=x_TK.device)
    scale_T = torch.empty(rows, dtype=torch.float32, device=x_TK.device)
    one = torch.empty(1, dtype=torch.float32, device=x_TK.device)
    _split_kernel[(rows,)](
        x_TK, parts_2TK, scale_T, one, rows, columns, x_TK.stride(0), LOW=LOW_SCALE, BLOCK_K=_BLOCK, num_warps=4
    )
    return parts_2TK.view(torch.float8_e4m3fn), scale_T, one


def multiply(x_TK: Tensor, weight: Quantised, bias_N: Tensor | None, out_TN: Tensor) -> None:
    """Write x W^T + b to ``out_TN``, rounded once to its type."""
    rows, outputs = out_TN.shape
    parts_2TK, scale_T, one = split(x_TK)
    # One scale for each whole operand, because sums with scales of rows are rounded to bf16 by the library.
    sums_2TN = torch._scaled_mm(
        parts_2TK, weight.packed_NB.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=False
    )
    _merge_kernel[(rows, triton.cdiv(outputs, _BLOCK))](
        sums_2TN,
        scale_T,
        weight.scale_NG,
        x_TK if bias_N is None else bias_N,
        out_TN,
        rows,
        outputs,
        BIAS=bias_N is not None,
        LOW=LOW_SCALE,
        BLOCK_N=_BLOCK,
        num_warps=4,
    )
