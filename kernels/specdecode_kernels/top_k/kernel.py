"""Draft proposals on a GPU: each program finds the best k of a slice, a second launch the best k of all slices.

Proposals need no exact noise, since verification is lossless for any proposal (README.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.noise.kernel import quick_gumbel, words
from specdecode_kernels.sample.kernel import scaled
from specdecode_kernels.sample.reference import Truncation

SLICES = 64
"""Maximum number of slices of a row."""


@triton.jit
def _take(score, index, free, out_score, out_index, K: tl.constexpr):
    """Write the K best free entries, best first, lower indices first among equals; index -1 if none is left."""
    for place in tl.static_range(K):
        top = tl.max(tl.where(free > 0, score, float("-inf")), 0)
        first = tl.min(tl.where((free > 0) & (score == top), index, 2147483647), 0)
        tl.store(out_score + place, top)
        tl.store(out_index + place, tl.where(first < 2147483647, first, -1).to(out_index.dtype.element_ty))
        free = tl.where(index == first, 0, free)


@triton.jit(do_not_specialize=["temperature_R", "seed_R", "position_R", "ids_V"])
def _slice_kernel(
    logits_RV,
    temperature_R,
    seed_R,
    position_R,
    ids_V,
    score_RSK,
    index_RSK,
    lse_RS,
    vocab_size,
    row_stride,
    sharpness,
    CUT: tl.constexpr,
    MAPPED: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the best K tokens of one slice of one row."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_R + row)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    x = scaled(logits_RV + row * row_stride, token, inside, temperature, sharpness)
    if temperature > 0:
        if CUT:
            top = tl.max(x, 0)
            lse = top + tl.log(tl.sum(tl.exp(x - tl.maximum(top, -1e30)), 0))
            tl.store(lse_RS + row * tl.num_programs(1) + piece, lse)
        seed, position = tl.load(seed_R + row), tl.load(position_R + row)
        if MAPPED:
            # Adjacent draft tokens are not adjacent target tokens, so each draws its whole counter and keeps one word.
            ids = tl.load(ids_V + token, mask=inside, other=0)
            four = tl.reshape(words(seed, position, 0, ids // 4), [BLOCK, 4])
            mine = tl.arange(0, 4)[None, :] == (ids % 4)[:, None]
            bits = tl.sum(tl.where(mine, four.to(tl.int64), 0), 1).to(tl.uint32)
        else:
            bits = words(seed, position, 0, piece * (BLOCK // 4) + tl.arange(0, BLOCK // 4))
        x = x + quick_gumbel(bits)
    out = (row * tl.num_programs(1) + piece) * K
    _take(x, token, inside.to(tl.int32), score_RSK + out, index_RSK + out, K)


@triton.jit
def _passing(x_K, lse, top_k, top_p, min_p):
    """Return whether candidates pass the cuts, as far as the other candidates tell."""
    better_KK = x_K[None, :] > x_K[:, None]
    mass_K = tl.sum(tl.where(better_KK, tl.exp(x_K - lse)[None, :], 0.0), 1)
    among_K = tl.sum(better_KK.to(tl.int32), 1) < tl.where(top_k > 0, top_k, 2147483647)
    return (mass_K < top_p) & among_K & (x_K >= tl.max(x_K, 0) + tl.log(min_p))


@triton.jit(do_not_specialize=["temperature_R", "top_k_R", "top_p_R", "min_p_R", "ids_V"])
def _join_kernel(
    logits_RV,
    temperature_R,
    top_k_R,
    top_p_R,
    min_p_R,
    score_RC,
    index_RC,
    lse_RS,
    score_RK,
    best_RK,
    ids_V,
    entries,
    row_stride,
    sharpness,
    CUT: tl.constexpr,
    MAPPED: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Find the best K of all slices of one row, put those that the cuts drop last, and map them to target ids."""
    row = tl.program_id(0).to(tl.int64)
    c, j = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    score = tl.load(score_RC + row * entries + c, mask=c < entries, other=float("-inf"))
    index = tl.load(index_RC + row * entries + c, mask=c < entries, other=-1)
    _take(score, index, (index >= 0).to(tl.int32), score_RK + row * K, best_RK + row * K, K)
    if CUT or MAPPED:
        tl.debug_barrier()
        best_K = tl.load(best_RK + row * K + j, mask=j < K, other=-1)
        listed_K = best_K >= 0  # of logits that are no numbers, none is listed
        place_K = j
        if CUT:
            lse_C = tl.load(lse_RS + row * (entries // K) + c, mask=c < entries // K, other=float("-inf"))
            top = tl.max(lse_C, 0)
            lse = top + tl.log(tl.sum(tl.exp(lse_C - top), 0))
            x_K = scaled(logits_RV + row * row_stride, best_K, listed_K, tl.load(temperature_R + row), sharpness)
            top_k, top_p, min_p = tl.load(top_k_R + row), tl.load(top_p_R + row), tl.load(min_p_R + row)
            # The candidates of a greedy row are in the order of their logits, which no cut changes.
            passing_K = (_passing(x_K, lse, top_k, top_p, min_p) & (j < K)).to(tl.int32)
            dropped_K = tl.sum(passing_K, 0) + tl.cumsum(1 - passing_K, 0)
            place_K = tl.where(passing_K > 0, tl.cumsum(passing_K, 0), dropped_K) - 1
        if MAPPED:
            best_K = tl.load(ids_V + best_K, mask=listed_K, other=-1)
        tl.debug_barrier()
        tl.store(best_RK + row * K + place_K, best_K, mask=j < K)


def top_k(
    logits_RV: Tensor,
    k: int,
    temperature_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    ids_V: Tensor | None,
    sharpness: float,
    truncation: Truncation | None,
    *,
    block: int | None = None,
) -> Tensor:
    """Return k target token ids per row, [R, k] int64, best first. Rows of temperature 0 are greedy.

    ``truncation`` None truncates nothing. Logits that are no numbers are not proposed; -1 stands for a missing token.
    """
    rows, vocab_size = logits_RV.shape
    assert logits_RV.stride(1) == 1, "a row's logits must be contiguous"
    assert 0 < k <= vocab_size, "no more can be proposed than there are tokens"
    device = logits_RV.device
    block = block or max(triton.next_power_of_2(triton.cdiv(vocab_size, SLICES)), 64)
    pieces = triton.cdiv(vocab_size, block)
    best_RK = torch.empty(rows, k, dtype=torch.int64, device=device)
    score_RK = torch.empty(rows, k, dtype=torch.float32, device=device)
    score_RSK = torch.empty(rows, pieces, k, dtype=torch.float32, device=device)
    index_RSK = torch.empty(rows, pieces, k, dtype=torch.int32, device=device)
    lse_RS = torch.empty(rows, pieces, dtype=torch.float32, device=device)
    cuts_R = truncation or (position_R, temperature_R, temperature_R)  # placeholders, not read without truncation
    cut, mapped = truncation is not None, ids_V is not None
    if not rows:
        return best_RK
    ids = seed_R if ids_V is None else ids_V
    _slice_kernel[(rows, pieces)](
        logits_RV,
        temperature_R,
        seed_R,
        position_R,
        ids,
        score_RSK,
        index_RSK,
        lse_RS,
        vocab_size,
        logits_RV.stride(0),
        sharpness,
        CUT=cut,
        MAPPED=mapped,
        K=k,
        BLOCK=block,
        num_warps=4,
    )
    _join_kernel[(rows,)](
        logits_RV,
        temperature_R,
        *cuts_R,
        score_RSK,
        index_RSK,
        lse_RS,
        score_RK,
        best_RK,
        ids,
        pieces * k,
        logits_RV.stride(0),
        sharpness,
        CUT=cut,
        MAPPED=mapped,
        K=k,
        BLOCK_K=triton.next_power_of_2(k),
        BLOCK_C=triton.next_power_of_2(pieces * k),
        num_warps=4,
    )
    return best_RK
