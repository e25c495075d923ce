"""Fused product of few rows on a GPU: a program reads a tile of the matrix once (README.md).

Tensor suffixes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.dependent import is_supported, options, release, wait


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program reads its part of the matrix."""

    outputs: int
    """Outputs of a program."""
    row_bytes: int
    """Bytes of a row of the matrix that are read at a time."""
    stages: int
    """Pipeline stages; one less is the number of tiles in flight."""
    warps: int


MOST_SMALL_OUTPUTS = 8192
"""Outputs of a small matrix. 4096 of them make 256 programs of 16, about two for each multiprocessor of an H100."""
TILES = {
    16: (Tile(16, 512, 4, 2), Tile(32, 512, 4, 4), Tile(32, 256, 3, 4)),
    32: (Tile(32, 512, 5, 4), Tile(64, 256, 4, 4), Tile(64, 256, 4, 4)),
    64: (Tile(32, 512, 4, 4), Tile(64, 256, 4, 4), Tile(64, 256, 4, 4)),
}
"""Tiles of a small matrix, of a large one, and of a gated one, by the rows of a tile.

The fastest in the sweep of `make gpu` on an H200, 2026-11-27 (benchmarks/results).
"""
FETCHED_BYTES = 12 * 2**20
"""Most bytes of the next matrix to ask for when a program has read its own part.

The memory delivers them while one kernel ends and the next begins. They stay in the L2 cache until the next product.
"""


@triton.jit
def _weights(weight_NK, n, column, size, outputs, EVEN: tl.constexpr):
    """Load a tile [N, K] of the matrix, which is read once."""
    place = weight_NK + n.to(tl.int64)[:, None] * size + column[None, :]
    inside = (n < outputs)[:, None]
    if not EVEN:
        inside = inside & (column < size)[None, :]
    return tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _fetch(then_RK, rows, row_bytes, ROWS: tl.constexpr, LINES: tl.constexpr):
    """Ask for the first LINES lines of this program's share of the rows of a matrix; nothing waits for them."""
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), rows - 1)
    line = tl.arange(0, LINES) * 128  # bytes of a line of the L2 cache
    place = then_RK.to(tl.uint64, bitcast=True) + row.to(tl.uint64)[:, None] * row_bytes + line[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
    )


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
    then_RK,
    then_rows,
    then_row_bytes,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    THEN_ROWS: tl.constexpr,
    THEN_LINES: tl.constexpr,
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
        tile = _weights(weight_NK, n, column, size, outputs, EVEN)
        acc_TN = tl.dot(x, tl.trans(tile), acc_TN, input_precision=PRECISION)
        if GATED:
            tile = _weights(up_NK, n, column, size, outputs, EVEN)
            up_TN = tl.dot(x, tl.trans(tile), up_TN, input_precision=PRECISION)
    release(DEPENDENT)
    if THEN_ROWS > 0:
        _fetch(then_RK, then_rows, then_row_bytes, THEN_ROWS, THEN_LINES)
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


def _lines(rows: int, row_bytes: int) -> int:
    """Return how many lines of 128 bytes of each row to ask for, a power of two."""
    wanted = min(FETCHED_BYTES // max(rows, 1), row_bytes) // 128
    return 2 ** (wanted.bit_length() - 1) if wanted else 1


def small_linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    residual_TN: Tensor | None,
    *,
    gated: bool,
    then_RK: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Return the product [T, N] ([T, N / 2] if gated); rows must be contiguous.

    ``then_RK`` is the matrix of the product that follows.
    """
    rows, size = x_TK.shape
    outputs = len(weight_NK) // 2 if gated else len(weight_NK)
    assert x_TK.stride(1) == 1, "rows must be contiguous"
    assert weight_NK.is_contiguous(), "rows of the matrix lie behind each other"
    assert residual_TN is None or residual_TN.stride(1) == 1, "rows must be contiguous"
    block_t = max(triton.next_power_of_2(rows), min(TILES))
    tile = tile or TILES[block_t][2 if gated else int(outputs > MOST_SMALL_OUTPUTS)]
    out_TN = torch.empty(rows, outputs, dtype=x_TK.dtype, device=x_TK.device)
    block_k = max(min(tile.row_bytes // x_TK.element_size(), triton.next_power_of_2(size)), 16)
    programs = triton.cdiv(outputs, tile.outputs)
    then_rows = len(then_RK) if then_RK is not None and FETCHED_BYTES and is_supported(x_TK.device) else 0
    then_row_bytes = then_RK.stride(0) * then_RK.itemsize if then_RK is not None else 0
    if rows:
        _small_linear_kernel[(programs,)](
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
            weight_NK if then_RK is None else then_RK,
            then_rows,
            then_row_bytes,
            BIAS=bias_N is not None,
            GATED=gated,
            RESIDUAL=residual_TN is not None,
            EVEN=size % block_k == 0,
            PRECISION="tf32x3" if x_TK.dtype == torch.float32 else "tf32",
            THEN_ROWS=triton.next_power_of_2(triton.cdiv(then_rows, programs)) if then_rows else 0,
            THEN_LINES=_lines(then_rows, then_row_bytes),
            BLOCK_T=block_t,
            BLOCK_N=tile.outputs,
            BLOCK_K=block_k,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **options(x_TK),
        )
    return out_TN
