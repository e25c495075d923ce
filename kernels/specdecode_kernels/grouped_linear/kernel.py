"""Grouping of rows by expert, and products with the matrix of each row's expert, on a GPU (README.md).

Tensor suffixes: T rows, K inputs, N outputs, X experts, M tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.grouped_linear.reference import Groups, most_tiles, tile_rows
from specdecode_kernels.quantised_linear.kernel import Operands, outputs_of, quantised_sums
from specdecode_kernels.quantised_linear.reference import Quantised
from specdecode_kernels.small_linear.kernel import load_tile, store_sums

GROUPED_AT_ONCE = 64
"""Rows or tiles that the grouping program handles at a time."""
ROW_BYTES = 256
"""Bytes of a row of a matrix that are read at a time."""


@triton.jit
def _chosen(logits_TX, t, x, rows, experts):
    """Return the largest logit of each row, and a one [T, X] at its first expert; none for rows that do not exist.

    A row whose logits are no numbers gets the last expert, so that it takes no place of another row.
    """
    inside = (t < rows)[:, None] & (x < experts)[None, :]
    place = logits_TX + t.to(tl.int64)[:, None] * experts + x[None, :]
    logit_TX = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
    top_T = tl.max(logit_TX, 1)
    first_T = tl.min(tl.where(logit_TX == top_T[:, None], x[None, :], experts), 1)
    one_TX = ((x[None, :] == tl.minimum(first_T, experts - 1)[:, None]) & inside).to(tl.int32)
    return top_T, one_TX


@triton.jit(do_not_specialize=["rows"])
def _group_kernel(
    logits_TX,
    order_T,
    score_T,
    tiles_M3,
    rows,
    experts,
    most,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """Sort the rows by expert and cut them into tiles, in one program."""
    x = tl.arange(0, BLOCK_X)
    step = tl.arange(0, BLOCK_T)
    count_X = tl.zeros([BLOCK_X], tl.int32)
    for start in range(0, rows, BLOCK_T):
        top_T, one_TX = _chosen(logits_TX, start + step, x, rows, experts)
        count_X += tl.sum(one_TX, 0)
        score = 1.0 / (1.0 + tl.exp(-top_T))
        tl.store(score_T + start + step, score.to(score_T.dtype.element_ty), mask=start + step < rows)
    end_X = tl.cumsum(count_X, 0)
    place_X = end_X - count_X
    for start in range(0, rows, BLOCK_T):
        top_T, one_TX = _chosen(logits_TX, start + step, x, rows, experts)
        before_TX = tl.cumsum(one_TX, 0) - one_TX
        place_T = tl.sum(one_TX * (place_X[None, :] + before_TX), 1)
        tl.store(order_T + place_T, start + step, mask=start + step < rows)
        place_X += tl.sum(one_TX, 0)
    tiles_X = (count_X + TILE - 1) // TILE
    tiles_end_X = tl.cumsum(tiles_X, 0)
    for start in range(0, most, BLOCK_T):
        m = start + step
        behind_MX = m[:, None] - (tiles_end_X - tiles_X)[None, :]
        owner_MX = ((behind_MX >= 0) & (behind_MX < tiles_X[None, :])).to(tl.int32)
        first_M = tl.sum(owner_MX * ((end_X - count_X)[None, :] + behind_MX * TILE), 1)
        expert_M = tl.sum(owner_MX * (x[None, :] + 1), 1) - 1
        tl.store(tiles_M3 + 3 * m, expert_M, mask=m < most)
        tl.store(tiles_M3 + 3 * m + 1, first_M, mask=m < most)
        tl.store(tiles_M3 + 3 * m + 2, tl.sum(owner_MX * end_X[None, :], 1), mask=m < most)


@triton.jit
def _grouped_kernel(
    x_TK,
    weight_XNK,
    order_T,
    score_T,
    tiles_M3,
    residual_TN,
    out_TN,
    size,
    outputs,
    x_stride,
    residual_stride,
    SCORED: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N outputs of a tile of rows; with GATED, ``outputs`` counts one half."""
    tile_3 = tiles_M3 + 3 * tl.program_id(0)
    expert = tl.load(tile_3)
    if expert >= 0:
        place = tl.load(tile_3 + 1) + tl.arange(0, BLOCK_T)
        real = place < tl.load(tile_3 + 2)
        t = tl.load(order_T + place, mask=real, other=0).to(tl.int64)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        halves = 2 if GATED else 1
        weight_NK = weight_XNK + expert.to(tl.int64) * halves * outputs * size
        up_NK = weight_NK + outputs.to(tl.int64) * size
        acc_TN = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        up_TN = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        if SCORED:
            score = tl.load(score_T + t, mask=real, other=0.0).to(tl.float32)
        for start in range(0, size, BLOCK_K):
            column = start + k
            inside = real[:, None]
            if not EVEN:
                inside = inside & (column < size)[None, :]
            x = tl.load(x_TK + t[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
            if SCORED:
                x = (x.to(tl.float32) * score[:, None]).to(x.dtype)
            tile = load_tile(weight_NK, n, column, size, outputs, EVEN, "")
            acc_TN = tl.dot(x, tl.trans(tile), acc_TN, input_precision=PRECISION)
            if GATED:
                tile = load_tile(up_NK, n, column, size, outputs, EVEN, "")
                up_TN = tl.dot(x, tl.trans(tile), up_TN, input_precision=PRECISION)
        store_sums(acc_TN, up_TN, residual_TN, out_TN, t, n, real, outputs, residual_stride, GATED, RESIDUAL)


@triton.jit
def _grouped_quantised_kernel(
    x_TK,
    packed_NB,
    scale_NG,
    zero_NG,
    order_T,
    score_T,
    tiles_M3,
    residual_TN,
    out_TN,
    columns,
    outputs,
    x_stride,
    packed_stride,
    residual_stride,
    groups,
    SCORED: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    INT4: tl.constexpr,
    GROUPED: tl.constexpr,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute BLOCK_N outputs of a tile of rows, with GATED alternately those of the gate and those that it gates.

    The score multiplies the sums of the inputs, which is the same as the inputs, before the gate.
    """
    tile_3 = tiles_M3 + 3 * tl.program_id(0)
    expert = tl.load(tile_3)
    if expert >= 0:
        place = tl.load(tile_3 + 1) + tl.arange(0, BLOCK_T)
        real = place < tl.load(tile_3 + 2)
        t = tl.load(order_T + place, mask=real, other=0).to(tl.int64)
        halves: tl.constexpr = 2 if GATED else 1
        i = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        place_N = expert.to(tl.int64) * halves * outputs + i // halves + i % halves * outputs
        acc_NT = quantised_sums(
            x_TK + t * x_stride,
            packed_NB + place_N * packed_stride,
            scale_NG,
            zero_NG,
            place_N,
            real,
            i < halves * outputs,
            columns,
            groups,
            INT4,
            GROUPED,
            ZERO,
            BITS,
            BLOCK_N,
            BLOCK_B,
            BLOCK_T,
            STAGES,
        )
        if SCORED:
            acc_NT *= tl.load(score_T + t, mask=real, other=0.0).to(tl.float32)[None, :]
        acc_TN = tl.trans(acc_NT)
        up_TN = acc_TN
        n = i
        if GATED:
            acc_TN, up_TN = tl.split(tl.reshape(acc_TN, [BLOCK_T, BLOCK_N // 2, 2]))
            n = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        store_sums(acc_TN, up_TN, residual_TN, out_TN, t, n, real, outputs, residual_stride, GATED, RESIDUAL)


def group(logits_TX: Tensor) -> Groups:
    """Return the rows of a pass by expert."""
    rows, experts = logits_TX.shape
    size, most = tile_rows(rows), most_tiles(rows, experts)
    order_T = torch.empty(rows, dtype=torch.int32, device=logits_TX.device)
    score_T = torch.empty(rows, dtype=logits_TX.dtype, device=logits_TX.device)
    tiles_M3 = torch.empty(most, 3, dtype=torch.int32, device=logits_TX.device)
    if rows:
        _group_kernel[(1,)](
            logits_TX.contiguous(),
            order_T,
            score_T,
            tiles_M3,
            rows,
            experts,
            most,
            TILE=size,
            BLOCK_T=GROUPED_AT_ONCE,
            BLOCK_X=triton.next_power_of_2(experts),
            num_warps=4,
        )
    return Groups(order_T, score_T, tiles_M3, size, experts)


def grouped_linear(
    x_TK: Tensor,
    matrices: Tensor | Quantised,
    groups: Groups,
    residual_TN: Tensor | None = None,
    *,
    scored: bool = False,
    gated: bool = False,
) -> Tensor:
    """Return the product [T, N] ([T, N / 2] if gated); rows must be contiguous."""
    rows, size = x_TK.shape
    outputs = groups.outputs(matrices) // 2 if gated else groups.outputs(matrices)
    assert x_TK.stride(1) == 1, "rows must be contiguous"
    assert residual_TN is None or residual_TN.stride(1) == 1, "rows must be contiguous"
    out_TN = torch.empty(rows, outputs, dtype=x_TK.dtype, device=x_TK.device)
    if not rows:
        return out_TN
    wide = x_TK.dtype == torch.float32
    # Other GPUs have room for fewer tiles in flight.
    stages = 4 if dispatch.is_hopper(x_TK) and not wide else 2
    how = {
        "SCORED": scored,
        "GATED": gated,
        "RESIDUAL": residual_TN is not None,
        "BLOCK_T": groups.tile_rows,
        "num_warps": 4,
    }
    grouped = (groups.order_T, groups.score_T, groups.tiles_M3, x_TK if residual_TN is None else residual_TN)
    residual_stride = 0 if residual_TN is None else residual_TN.stride(0)
    if isinstance(matrices, Quantised):
        stored, together = Operands.of(matrices), outputs * 2 if gated else outputs
        block_n = outputs_of(together, rows + 1, wide=wide)
        _grouped_quantised_kernel[(len(groups.tiles_M3), triton.cdiv(together, block_n))](
            x_TK,
            *stored.tensors,
            *grouped,
            out_TN,
            size,
            outputs,
            x_TK.stride(0),
            matrices.packed_NB.stride(0),
            residual_stride,
            stored.groups,
            BLOCK_N=block_n,
            STAGES=stages,
            **how,
            **stored.constants,
        )
        return out_TN
    assert matrices.is_contiguous(), "matrices lie behind each other"
    block_k = max(min(ROW_BYTES // x_TK.element_size(), triton.next_power_of_2(size)), 16)
    block_n = 32 if wide else 64
    _grouped_kernel[(len(groups.tiles_M3), triton.cdiv(outputs, block_n))](
        x_TK,
        matrices,
        *grouped,
        out_TN,
        size,
        outputs,
        x_TK.stride(0),
        residual_stride,
        EVEN=size % block_k == 0,
        PRECISION="tf32x3" if wide else "tf32",
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_stages=stages,
        **how,
    )
    return out_TN
