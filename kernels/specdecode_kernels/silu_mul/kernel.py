"""SiLU(gate) * up on a GPU, in one pass over the output of the joined projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Columns that a program handles."""


@triton.jit
def _silu_mul_kernel(gate_up_T2F, out_TF, size, row_stride, BLOCK: tl.constexpr):
    """Compute one block of columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < size
    gate = tl.load(gate_up_T2F + row * row_stride + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_T2F + row * row_stride + size + f, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_TF + row * size + f, out.to(out_TF.dtype.element_ty), mask=inside)


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """Return SiLU(gate) * up, [T, F]; rows must be contiguous."""
    rows, size = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    assert gate_up_T2F.shape[1] == 2 * size, "two halves of equal width"
    assert gate_up_T2F.stride(1) == 1, "rows must be contiguous"
    out_TF = torch.empty(rows, size, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    if rows:
        grid = (rows, triton.cdiv(size, BLOCK))
        _silu_mul_kernel[grid](gate_up_T2F, out_TF, size, gate_up_T2F.stride(0), BLOCK=BLOCK, num_warps=4)
    return out_TF
