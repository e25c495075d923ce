"""Fused product of few rows on a GPU: a program reads a tile of the matrix once (README.md).

Tensor suffixes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.dependent import options, release, wait


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes with which a program reads its part of the matrix."""

    outputs: int
    """Outputs of a program."""
    row_bytes: int
    """Bytes of a row of the matrix that are read at a time."""
    stages: int
    """Pipeline stages; one less is the number of tiles in flight."""
    warps: int


MOST_OUTPUTS = (4096, 8192)
"""Most outputs of a small and of a middle matrix: those of a hidden size, and the joined queries, keys and values."""
TILES = {
    16: (Tile(16, 512, 4, 2), Tile(16, 512, 4, 2), Tile(32, 512, 4, 4), Tile(32, 256, 3, 4)),
    32: (Tile(32, 512, 5, 4), Tile(64, 512, 3, 4), Tile(64, 256, 4, 4), Tile(64, 256, 4, 4)),
    64: (Tile(32, 512, 4, 4), Tile(64, 256, 5, 8), Tile(64, 256, 4, 4), Tile(64, 256, 4, 4)),
}
"""Tiles of a small, a middle, a large and a gated matrix, by the rows of a tile of rows.

The fastest in the sweep of `make gpu` on an H200, 2026-11-27 (benchmarks/results/gpu-h200-2026-11-27-tiles.json). The
tiles of a small matrix make 128 or 256 programs of 4,096 outputs, one or two for each multiprocessor.
"""
FP32_ROW_BYTES = 256
"""`Tile.row_bytes` of fp32: its products are sums of three, whose order depends on the inputs read at a time."""


@triton.jit
def load_tile(weight_NK, n, column, size, outputs, EVEN: tl.constexpr, EVICTION: tl.constexpr):
    """Load a tile [N, K] of a matrix."""
    place = weight_NK + n.to(tl.int64)[:, None] * size + column[None, :]
    inside = (n < outputs)[:, None]
    if not EVEN:
        inside = inside & (column < size)[None, :]
    return tl.load(place, mask=inside, other=0.0, eviction_policy=EVICTION)


@triton.jit
def store_sums(
    acc_TN,
    up_TN,
    residual_TN,
    out_TN,
    t,
    n,
    real,
    outputs,
    residual_stride,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Store the sums of the rows ``t`` that are real, after the gate and with the residual."""
    if GATED:
        acc_TN = acc_TN / (1.0 + tl.exp(-acc_TN)) * up_TN
    stored = real[:, None] & (n < outputs)[None, :]
    if RESIDUAL:
        place = residual_TN + t[:, None] * residual_stride + n[None, :]
        acc_TN += tl.load(place, mask=stored, other=0.0).to(tl.float32)
    tl.store(out_TN + t[:, None] * outputs + n[None, :], acc_TN.to(out_TN.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["rows"])
def _small_linear_kernel(
    x_TK,
    weight_NK,
    bias_N,
    residual_TN,
    out_TN,
    rows,
    size,
    outputs,
    x_stride,
    residual_stride,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N outputs of all rows; with GATED, ``outputs`` counts one half."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    real = t < rows
    up_NK = weight_NK + outputs.to(tl.int64) * size
    wait(DEPENDENT)
    acc_TN = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    up_TN = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for start in range(0, size, BLOCK_K):
        column = start + k
        inside = real[:, None]
        if not EVEN:
            inside = inside & (column < size)[None, :]
        x = tl.load(x_TK + t[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        tile = load_tile(weight_NK, n, column, size, outputs, EVEN, "evict_first")  # read once
        acc_TN = tl.dot(x, tl.trans(tile), acc_TN, input_precision=PRECISION)
        if GATED:
            tile = load_tile(up_NK, n, column, size, outputs, EVEN, "evict_first")
            up_TN = tl.dot(x, tl.trans(tile), up_TN, input_precision=PRECISION)
    release(DEPENDENT)
    if BIAS:
        acc_TN += tl.load(bias_N + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_TN += tl.load(bias_N + outputs + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    store_sums(acc_TN, up_TN, residual_TN, out_TN, t, n, real, outputs, residual_stride, GATED, RESIDUAL)


def small_linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    residual_TN: Tensor | None,
    *,
    gated: bool,
    tile: Tile | None = None,
) -> Tensor:
    """Return the product [T, N] ([T, N / 2] if gated); rows must be contiguous."""
    rows, size = x_TK.shape
    outputs = len(weight_NK) // 2 if gated else len(weight_NK)
    assert x_TK.stride(1) == 1, "rows must be contiguous"
    assert weight_NK.is_contiguous(), "rows of the matrix lie behind each other"
    assert residual_TN is None or residual_TN.stride(1) == 1, "rows must be contiguous"
    block_t = max(triton.next_power_of_2(rows), min(TILES))
    tile = tile or TILES[block_t][len(MOST_OUTPUTS) + 1 if gated else bisect_left(MOST_OUTPUTS, outputs)]
    row_bytes = FP32_ROW_BYTES if x_TK.dtype == torch.float32 else tile.row_bytes
    out_TN = torch.empty(rows, outputs, dtype=x_TK.dtype, device=x_TK.device)
    block_k = max(min(row_bytes // x_TK.element_size(), triton.next_power_of_2(size)), 16)
    if rows:
        _small_linear_kernel[(triton.cdiv(outputs, tile.outputs),)](
            x_TK,
            weight_NK,
            weight_NK if bias_N is None else bias_N,
            x_TK if residual_TN is None else residual_TN,
            out_TN,
            rows,
            size,
            outputs,
            x_TK.stride(0),
            0 if residual_TN is None else residual_TN.stride(0),
            BIAS=bias_N is not None,
            GATED=gated,
            RESIDUAL=residual_TN is not None,
            EVEN=size % block_k == 0,
            PRECISION="tf32x3" if x_TK.dtype == torch.float32 else "tf32",
            BLOCK_T=block_t,
            BLOCK_N=tile.outputs,
            BLOCK_K=block_k,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **options(x_TK),
        )
    return out_TN
