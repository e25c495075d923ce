"""Fused product of few rows on a GPU: a program reads a tile of the matrix once (README.md).

Tensor suffixes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.small_linear.reference import InputNorm

BLOCK_T = 16
"""Rows of a tile: the least that the matrix unit takes."""
BLOCK_N = 32
"""Outputs of a program. 4096 outputs make 128 programs, about one for each multiprocessor of an H100."""
BLOCK_K_BYTES = 256
"""Bytes of a row of the matrix that a program reads at a time."""
STAGES = 5
"""Tiles in flight. Five of 8 KiB cover the latency of the memory with one program on a multiprocessor."""
GATED_STAGES = 3


@triton.jit
def _weights(weight_NK, n, column, size, outputs, EVEN: tl.constexpr):
    """Load a tile [N, K] of the matrix, which is read once."""
    place = weight_NK + n.to(tl.int64)[:, None] * size + column[None, :]
    inside = (n < outputs)[:, None]
    if not EVEN:
        inside = inside & (column < size)[None, :]
    return tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["rows"])
def _small_linear_kernel(
    x_TK,
    weight_NK,
    bias_N,
    norm_K,
    residual_TN,
    out_TN,
    rows,
    size,
    outputs,
    x_stride,
    residual_stride,
    eps,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N outputs of all rows; with GATED, ``outputs`` counts one half."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    real = t < rows
    acc_TN = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    up_TN = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    squares_T = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, size, BLOCK_K):
        column = start + k
        inside = real[:, None]
        if not EVEN:
            inside = inside & (column < size)[None, :]
        x = tl.load(x_TK + t[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares_T += tl.sum(wide * wide, 1)
            factor = tl.load(norm_K + column, mask=column < size, other=0.0).to(tl.float32)
            x = (wide * factor[None, :]).to(x.dtype)
        tile = _weights(weight_NK, n, column, size, outputs, EVEN)
        acc_TN = tl.dot(x, tl.trans(tile), acc_TN, input_precision=PRECISION)
        if GATED:
            tile = _weights(weight_NK + outputs.to(tl.int64) * size, n, column, size, outputs, EVEN)
            up_TN = tl.dot(x, tl.trans(tile), up_TN, input_precision=PRECISION)
    if NORM:
        scale_T = tl.math.rsqrt(squares_T / size + eps)
        acc_TN = acc_TN * scale_T[:, None]
        up_TN = up_TN * scale_T[:, None]
    if BIAS:
        acc_TN += tl.load(bias_N + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_TN += tl.load(bias_N + outputs + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc_TN = acc_TN / (1.0 + tl.exp(-acc_TN)) * up_TN
    stored = real[:, None] & (n < outputs)[None, :]
    if RESIDUAL:
        place = residual_TN + t[:, None] * residual_stride + n[None, :]
        acc_TN += tl.load(place, mask=stored, other=0.0).to(tl.float32)
    tl.store(out_TN + t[:, None] * outputs + n[None, :], acc_TN.to(out_TN.dtype.element_ty), mask=stored)


def small_linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    norm: InputNorm | None,
    residual_TN: Tensor | None,
    *,
    gated: bool,
) -> Tensor:
    """Return the product [T, N] ([T, N / 2] if gated) of at most BLOCK_T rows; rows must be contiguous."""
    rows, size = x_TK.shape
    outputs = len(weight_NK) // 2 if gated else len(weight_NK)
    assert rows <= BLOCK_T, "a program has one tile of rows"
    assert x_TK.stride(1) == 1, "rows must be contiguous"
    assert weight_NK.is_contiguous(), "rows of the matrix lie behind each other"
    assert residual_TN is None or residual_TN.stride(1) == 1, "rows must be contiguous"
    out_TN = torch.empty(rows, outputs, dtype=x_TK.dtype, device=x_TK.device)
    block_k = max(min(BLOCK_K_BYTES // x_TK.element_size(), triton.next_power_of_2(size)), 16)
    if rows:
        _small_linear_kernel[(triton.cdiv(outputs, BLOCK_N),)](
            x_TK,
            weight_NK,
            weight_NK if bias_N is None else bias_N,
            weight_NK if norm is None else norm.weight_K,
            x_TK if residual_TN is None else residual_TN,
            out_TN,
            rows,
            size,
            outputs,
            x_TK.stride(0),
            0 if residual_TN is None else residual_TN.stride(0),
            0.0 if norm is None else norm.eps,
            NORM=norm is not None,
            BIAS=bias_N is not None,
            GATED=gated,
            RESIDUAL=residual_TN is not None,
            EVEN=size % block_k == 0,
            PRECISION="tf32x3" if x_TK.dtype == torch.float32 else "tf32",
            BLOCK_T=BLOCK_T,
            BLOCK_N=BLOCK_N,
            BLOCK_K=block_k,
            num_warps=4,
            num_stages=GATED_STAGES if gated else STAGES,
        )
    return out_TN
