"""Draft proposals on a GPU: each program finds the best k of a slice, a second launch the best k of all slices.

Proposals need no exact noise, since verification is lossless for any proposal (README.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.noise.kernel import quick_gumbel, words
from specdecode_kernels.sample.kernel import Cuts, passes_cuts, scaled

BLOCK = 2048


@triton.jit
def _take(score, index, free, out_score, out_index, K: tl.constexpr):
    """Write the K best free entries, best first, lower indices first among equals; index -1 if none is left."""
    for place in tl.static_range(K):
        top = tl.max(tl.where(free > 0, score, float("-inf")), 0)
        first = tl.min(tl.where((free > 0) & (score == top), index, 2147483647), 0)
        tl.store(out_score + place, top)
        tl.store(out_index + place, tl.where(first < 2147483647, first, -1).to(out_index.dtype.element_ty))
        free = tl.where(index == first, 0, free)


@triton.jit(do_not_specialize=["temperature_R", "seed_R", "position_R", "ids_V", "threshold_R", "last_R"])
def _slice_kernel(
    logits_RV,
    temperature_R,
    seed_R,
    position_R,
    ids_V,
    threshold_R,
    last_R,
    score_RSK,
    index_RSK,
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
            x = tl.where(passes_cuts(x, token, tl.load(threshold_R + row), tl.load(last_R + row)), x, float("-inf"))
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


@triton.jit(do_not_specialize=["ids_V"])
def _join_kernel(
    score_RC, index_RC, score_RK, best_RK, ids_V, entries, MAPPED: tl.constexpr, K: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Find the best K of all slices of one row and map them to target ids."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    score = tl.load(score_RC + row * entries + c, mask=c < entries, other=float("-inf"))
    index = tl.load(index_RC + row * entries + c, mask=c < entries, other=-1)
    _take(score, index, (index >= 0).to(tl.int32), score_RK + row * K, best_RK + row * K, K)
    if MAPPED:
        tl.debug_barrier()
        for place in tl.static_range(K):
            at = best_RK + row * K + place
            tl.store(at, tl.load(ids_V + tl.load(at)))


def top_k(
    logits_RV: Tensor,
    k: int,
    temperature_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    ids_V: Tensor | None,
    sharpness: float,
    cuts: Cuts | None,
    *,
    block: int = BLOCK,
) -> Tensor:
    """Return k target token ids per row, [R, k] int64, best first. Rows of temperature 0 are greedy."""
    rows, vocab_size = logits_RV.shape
    assert logits_RV.stride(1) == 1, "a row's logits must be contiguous"
    assert 0 < k <= vocab_size, "no more can be proposed than there are tokens"
    device = logits_RV.device
    pieces = triton.cdiv(vocab_size, block)
    best_RK = torch.empty(rows, k, dtype=torch.int64, device=device)
    score_RK = torch.empty(rows, k, dtype=torch.float32, device=device)
    score_RSK = torch.empty(rows, pieces, k, dtype=torch.float32, device=device)
    index_RSK = torch.empty(rows, pieces, k, dtype=torch.int32, device=device)
    if not rows:
        return best_RK
    _slice_kernel[(rows, pieces)](
        logits_RV,
        temperature_R,
        seed_R,
        position_R,
        seed_R if ids_V is None else ids_V,
        temperature_R if cuts is None else cuts.threshold_R,
        index_RSK if cuts is None else cuts.last_R,
        score_RSK,
        index_RSK,
        vocab_size,
        logits_RV.stride(0),
        sharpness,
        CUT=cuts is not None,
        MAPPED=ids_V is not None,
        K=k,
        BLOCK=block,
        num_warps=4,
    )
    _join_kernel[(rows,)](
        score_RSK,
        index_RSK,
        score_RK,
        best_RK,
        seed_R if ids_V is None else ids_V,
        pieces * k,
        MAPPED=ids_V is not None,
        K=k,
        BLOCK_C=triton.next_power_of_2(pieces * k),
        num_warps=4,
    )
    return best_RK
