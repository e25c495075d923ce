"""Products with quantised weights on a GPU: weights are dequantised in registers, right before they are used.

One row is a sum per output (`_one_row_kernel`). More rows use the matrix units (`_rows_kernel`), in tiles of up to 64
rows. There rows and outputs exchange roles, W x^T, because outputs are many and rows are few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.quantised_linear.choice import MOST_TILE_ROWS
from specdecode_kernels.quantised_linear.reference import Quantised

TILE_ROWS = 64
"""Rows of a tile at most."""
BLOCK_K = 128
"""Number of inputs that a program reads at a time if a row has one scale; else it reads one group."""


@triton.jit
def _zeros(zero_NG, at_N, real, ZERO: tl.constexpr):
    """Return the integers [N, 1] of a group of int4 that stand for 0."""
    if ZERO:
        return tl.load(zero_NG + at_N, mask=real, other=0).to(tl.int32)[:, None]
    else:
        return tl.full((real.shape[0], 1), 8, tl.int32)


@triton.jit
def _int4(nibbles_NB, zero_N1, dtype: tl.constexpr):
    """Return the levels of integers from 0 to 15, exactly.

    The integers become the last bits of a number whose last bit counts 1, which is subtracted again. Converting them
    would take twice the instructions, and those of conversion are slow.
    """
    if dtype == tl.bfloat16:
        return (nibbles_NB.to(tl.int16) | 0x4300).to(dtype, bitcast=True) - (zero_N1 + 128).to(dtype)
    elif dtype == tl.float16:
        return (nibbles_NB.to(tl.int16) | 0x6400).to(dtype, bitcast=True) - (zero_N1 + 1024).to(dtype)
    else:
        return (nibbles_NB.to(tl.int32) | 0x4B000000).to(dtype, bitcast=True) - (zero_N1 + 8388608).to(dtype)


@triton.jit
def _levels(w_NB, dtype: tl.constexpr, BITS: tl.constexpr):
    """Return the levels of int8 or fp8 weights; with BITS, those of fp8 (e4m3) from their bits.

    The exponent of fp32 has 127 - 7 more steps below 1. All levels, the subnormal ones included, are exact.
    """
    if BITS:
        bits = w_NB.to(tl.int32)
        placed = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        return (placed.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)
    else:
        return w_NB.to(dtype)


@triton.jit
def _one_row_kernel(
    x_K,
    packed_NB,
    scale_NG,
    zero_NG,
    bias_N,
    out_N,
    outputs,
    columns,
    packed_stride,
    groups,
    INT4: tl.constexpr,
    GROUPED: tl.constexpr,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Compute one row: a tile of BLOCK_N by BLOCK_B partial sums stays in registers and is added up at the end."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = n < outputs
    b = tl.arange(0, BLOCK_B)
    row_N = packed_NB + n.to(tl.int64) * packed_stride
    acc_NB = tl.zeros((BLOCK_N, BLOCK_B), tl.float32)
    for group in tl.range(0, groups, num_stages=4):
        at_N = n.to(tl.int64) * groups + group
        if INT4:
            first = group * BLOCK_B * 2
            bytes_NB = tl.load(row_N[:, None] + group * BLOCK_B + b[None, :], mask=real[:, None], other=0)
            scale_N = tl.load(scale_NG + at_N, mask=real, other=0.0).to(tl.float32)
            zero_N1 = _zeros(zero_NG, at_N, real, ZERO)
            x_low_B = tl.load(x_K + first + b, mask=first + b < columns, other=0.0).to(tl.float32)
            at_high = first + BLOCK_B + b
            x_high_B = tl.load(x_K + at_high, mask=at_high < columns, other=0.0).to(tl.float32)
            part_NB = _int4(bytes_NB & 15, zero_N1, tl.float32) * x_low_B[None, :]
            part_NB += _int4(bytes_NB >> 4, zero_N1, tl.float32) * x_high_B[None, :]
            acc_NB += part_NB * scale_N[:, None]
        else:
            k = group * BLOCK_B + b
            inside = k < columns
            w_NB = tl.load(row_N[:, None] + k[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            x_B = tl.load(x_K + k, mask=inside, other=0.0).to(tl.float32)
            part_NB = _levels(w_NB, tl.float32, BITS) * x_B[None, :]
            if GROUPED:
                part_NB *= tl.load(scale_NG + at_N, mask=real, other=0.0).to(tl.float32)[:, None]
            acc_NB += part_NB
    out = tl.sum(acc_NB, 1)
    if not GROUPED:
        out *= tl.load(scale_NG + n, mask=real, other=0.0)
    if BIAS:
        out += tl.load(bias_N + n, mask=real, other=0.0).to(tl.float32)
    tl.store(out_N + n, out.to(out_N.dtype.element_ty), mask=real)


@triton.jit
def quantised_sums(
    row_T,
    row_N,
    scale_NG,
    zero_NG,
    place_N,
    inside_T,
    real,
    columns,
    groups,
    INT4: tl.constexpr,
    GROUPED: tl.constexpr,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the sums [N, T] of a tile of rows with rows of the matrix, whose scales are at ``place_N``.

    Levels are exact in every type of x, so only sums are rounded; with GROUPED, the sum of each group is scaled.
    """
    b = tl.arange(0, BLOCK_B)
    dtype: tl.constexpr = row_T.dtype.element_ty
    acc_NT = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for group in tl.range(0, groups, num_stages=STAGES):
        at_N = place_N * groups + group
        if INT4:
            first = group * BLOCK_B * 2
            bytes_NB = tl.load(row_N[:, None] + group * BLOCK_B + b[None, :], mask=real[:, None], other=0)
            scale_N = tl.load(scale_NG + at_N, mask=real, other=0.0).to(tl.float32)
            zero_N1 = _zeros(zero_NG, at_N, real, ZERO)
            low, high = first + b, first + BLOCK_B + b
            x_low_BT = tl.load(
                row_T[None, :] + low[:, None], mask=inside_T[None, :] & (low < columns)[:, None], other=0.0
            )
            x_high_BT = tl.load(
                row_T[None, :] + high[:, None], mask=inside_T[None, :] & (high < columns)[:, None], other=0.0
            )
            part_NT = tl.dot(_int4(bytes_NB & 15, zero_N1, dtype), x_low_BT, input_precision="ieee")
            part_NT = tl.dot(_int4(bytes_NB >> 4, zero_N1, dtype), x_high_BT, part_NT, input_precision="ieee")
            acc_NT += part_NT * scale_N[:, None]
        else:
            k = group * BLOCK_B + b
            inside = k < columns
            w_NB = tl.load(row_N[:, None] + k[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            x_BT = tl.load(row_T[None, :] + k[:, None], mask=inside_T[None, :] & inside[:, None], other=0.0)
            if GROUPED:
                part_NT = tl.dot(_levels(w_NB, dtype, BITS), x_BT, input_precision="ieee")
                acc_NT += part_NT * tl.load(scale_NG + at_N, mask=real, other=0.0).to(tl.float32)[:, None]
            else:
                acc_NT = tl.dot(_levels(w_NB, dtype, BITS), x_BT, acc_NT, input_precision="ieee")
    if not GROUPED:
        acc_NT *= tl.load(scale_NG + place_N, mask=real, other=0.0)[:, None]
    return acc_NT


@triton.jit(do_not_specialize=["rows"])
def _rows_kernel(
    x_TK,
    packed_NB,
    scale_NG,
    zero_NG,
    bias_N,
    out_TN,
    rows,
    outputs,
    columns,
    x_stride,
    packed_stride,
    groups,
    INT4: tl.constexpr,
    GROUPED: tl.constexpr,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute a tile of BLOCK_T rows on the matrix units."""
    # Programs of the same outputs follow each other, so that they find the weights in the L2 cache.
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real, inside_T, place_N = n < outputs, t < rows, n.to(tl.int64)
    acc_NT = quantised_sums(
        x_TK + t.to(tl.int64) * x_stride,
        packed_NB + place_N * packed_stride,
        scale_NG,
        zero_NG,
        place_N,
        inside_T,
        real,
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
    if BIAS:
        acc_NT += tl.load(bias_N + n, mask=real, other=0.0).to(tl.float32)[:, None]
    at_NT = t.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(out_TN + at_NT, acc_NT.to(out_TN.dtype.element_ty), mask=real[:, None] & inside_T[None, :])


@dataclass(frozen=True, slots=True)
class Operands:
    """Arguments of the kernels that describe a quantised matrix: tensors, number of groups in a row, and constants."""

    tensors: tuple[Tensor, Tensor, Tensor]
    groups: int
    constants: dict[str, Any]

    @classmethod
    def of(cls, weight: Quantised) -> Operands:
        """Return the arguments for ``weight``."""
        assert weight.packed_NB.is_contiguous(), "weights are packed"
        assert weight.scale_NG.is_contiguous(), "scales are packed"
        int4, grouped = weight.kind == "int4", is_grouped(weight)
        block_k = weight.group if grouped else BLOCK_K
        # GPUs that know no fp8 get the bits.
        bits = weight.kind == "fp8" and not dispatch.has_fp8(weight.packed_NB)
        packed_NB = weight.packed_NB.view(torch.uint8) if bits else weight.packed_NB
        constants = {
            "INT4": int4,
            "GROUPED": grouped,
            "ZERO": weight.zero_NG is not None,
            "BITS": bits,
            "BLOCK_B": block_k // 2 if int4 else block_k,
        }
        zero_NG = packed_NB if weight.zero_NG is None else weight.zero_NG
        return cls((packed_NB, weight.scale_NG, zero_NG), triton.cdiv(weight.columns, block_k), constants)


def linear(x_TK: Tensor, weight: Quantised, bias_N: Tensor | None = None) -> Tensor:
    """Return x W^T + b, [T, N], for up to MOST_TILE_ROWS rows; rows of x must be contiguous."""
    rows, columns = x_TK.shape
    assert columns == weight.columns, "x has as many columns as the matrix"
    assert rows <= MOST_TILE_ROWS, "more rows are bound by arithmetic"
    assert x_TK.stride(1) == 1, "rows must be contiguous"
    out_TN = torch.empty(rows, weight.rows, dtype=x_TK.dtype, device=x_TK.device)
    if not rows:
        return out_TN
    stored = Operands.of(weight)
    given = (x_TK, *stored.tensors, x_TK if bias_N is None else bias_N, out_TN)
    constants, groups = stored.constants | {"BIAS": bias_N is not None}, stored.groups
    sizes = (weight.rows, columns)
    wide = x_TK.dtype == torch.float32
    block_n = outputs_of(weight.rows, rows, wide=wide)
    tiles = triton.cdiv(weight.rows, block_n)
    if rows == 1:
        _one_row_kernel[(tiles,)](
            *given, *sizes, weight.packed_NB.stride(0), groups, BLOCK_N=block_n, num_warps=4, **constants
        )
        return out_TN
    block_t = max(min(triton.next_power_of_2(rows), TILE_ROWS), 16)
    _rows_kernel[(triton.cdiv(rows, block_t), tiles)](
        *given,
        rows,
        *sizes,
        x_TK.stride(0),
        weight.packed_NB.stride(0),
        groups,
        BLOCK_N=block_n,
        BLOCK_T=block_t,
        STAGES=2 if wide else 4,
        num_warps=4,
        **constants,
    )
    return out_TN


def is_grouped(weight: Quantised) -> bool:
    """Return whether a row has several scales, or is int4, whose bytes hold two inputs of a group."""
    return weight.kind == "int4" or weight.group < weight.columns


def outputs_of(outputs: int, rows: int, *, wide: bool) -> int:
    """Return the number of outputs of a program: few for small matrices, so that every multiprocessor has a program.

    A tile of fp32 (``wide``) needs twice the registers.
    """
    if rows == 1 or wide:
        return 16
    return 64 if outputs >= 16384 else 32
