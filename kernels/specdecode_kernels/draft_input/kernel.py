"""Input of an EAGLE head on a GPU: two rows are gathered, normed and concatenated in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.rms_norm.kernel import normed


@triton.jit
def _row(rows, index, weight, size, eps, NORM: tl.constexpr, BLOCK: tl.constexpr):
    """Load one row in fp32 and return (plain, normed if NORM)."""
    e = tl.arange(0, BLOCK)
    x = tl.load(rows + index * size + e, mask=e < size, other=0.0).to(tl.float32)
    if NORM:
        return x, normed(x, tl.load(weight + e, mask=e < size, other=0.0).to(tl.float32), eps, size)
    else:
        return x, x


@triton.jit(do_not_specialize=["tokens_T", "source_T"])
def _draft_input_kernel(
    embedding_VA,
    tokens_T,
    hidden_RE,
    source_T,
    token_weight_A,
    hidden_weight_E,
    pair_TC,
    hidden_TE,
    token_size,
    hidden_size,
    eps,
    TOKEN_NORM: tl.constexpr,
    HIDDEN_NORM: tl.constexpr,
    SOURCES: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write one half of one pair: the embedding in programs (row, 0), the hidden state in programs (row, 1)."""
    row = tl.program_id(0).to(tl.int64)
    pair = pair_TC + row * (token_size + hidden_size)
    if tl.program_id(1) == 0:
        a = tl.arange(0, BLOCK_A)
        _, out = _row(embedding_VA, tl.load(tokens_T + row), token_weight_A, token_size, eps, TOKEN_NORM, BLOCK_A)
        tl.store(pair + a, out.to(pair_TC.dtype.element_ty), mask=a < token_size)
    else:
        e = tl.arange(0, BLOCK_E)
        source = row
        if SOURCES:
            source = tl.load(source_T + row)
        plain, out = _row(hidden_RE, source, hidden_weight_E, hidden_size, eps, HIDDEN_NORM, BLOCK_E)
        tl.store(pair + token_size + e, out.to(pair_TC.dtype.element_ty), mask=e < hidden_size)
        tl.store(hidden_TE + row * hidden_size + e, plain.to(hidden_TE.dtype.element_ty), mask=e < hidden_size)


def draft_input(
    embedding_VA: Tensor,
    tokens_T: Tensor,
    hidden_RE: Tensor,
    source_T: Tensor | None,
    token_weight_A: Tensor | None,
    hidden_weight_E: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return (pair [T, A + E], hidden [T, E]); without sources row t reads state t."""
    rows, token_size, hidden_size = len(tokens_T), embedding_VA.shape[1], hidden_RE.shape[1]
    assert embedding_VA.is_contiguous(), "rows lie behind each other"
    hidden_RE = hidden_RE.contiguous()
    pair_TC = torch.empty(rows, token_size + hidden_size, dtype=hidden_RE.dtype, device=hidden_RE.device)
    hidden_TE = torch.empty(rows, hidden_size, dtype=hidden_RE.dtype, device=hidden_RE.device)
    if rows:
        _draft_input_kernel[(rows, 2)](
            embedding_VA,
            tokens_T,
            hidden_RE,
            tokens_T if source_T is None else source_T,
            embedding_VA if token_weight_A is None else token_weight_A,
            hidden_RE if hidden_weight_E is None else hidden_weight_E,
            pair_TC,
            hidden_TE,
            token_size,
            hidden_size,
            eps,
            TOKEN_NORM=token_weight_A is not None,
            HIDDEN_NORM=hidden_weight_E is not None,
            SOURCES=source_T is not None,
            BLOCK_A=triton.next_power_of_2(token_size),
            BLOCK_E=triton.next_power_of_2(hidden_size),
            num_warps=8,
        )
    return pair_TC, hidden_TE
