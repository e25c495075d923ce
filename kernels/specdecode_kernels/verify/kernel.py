"""Verification on a GPU: the target's token after every node (README.md).

Multi-round sampling is in rounds.py. Tensor suffixes: R rows, V vocabulary, S splits of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.dispatch import processors
from specdecode_kernels.noise.kernel import exact_gumbel, quick_gumbel, words
from specdecode_kernels.sample.kernel import Cuts, passes_cuts, scaled

BLOCK = 1024


@triton.jit
def better(x, bits, token, best, at):
    """Update (best score, its token) with a block of tokens; ties go to the lower token.

    ``x`` are log-probabilities up to a constant. The fp32 noise decides whether any token of the block comes near the
    best score, which is rare after the first few blocks; only then is the exact fp64 score computed.
    """
    reach = tl.max(x + quick_gumbel(bits), 0)
    if reach.to(tl.float64) >= best - (1e-3 + 1e-6 * tl.abs(reach)):
        score = x.to(tl.float64) + exact_gumbel(bits)
        top = tl.max(score, 0)
        first = tl.min(tl.where(score == top, token, 2147483647), 0)
        at = tl.where(top > best, first, at)
        best = tl.maximum(top, best)
    return best, at


@triton.jit(do_not_specialize=["temperature_R", "seed_R", "position_R", "threshold_R", "last_R", "share"])
def _best_kernel(
    logits_RV,
    temperature_R,
    seed_R,
    position_R,
    threshold_R,
    last_R,
    best_RS,
    at_RS,
    vocab_size,
    row_stride,
    share,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the best score in one split of a row, and its token."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_R + row)
    seed, position = tl.load(seed_R + row), tl.load(position_R + row)
    v = tl.arange(0, BLOCK)
    best = tl.max(tl.full([1], float("-inf"), tl.float64), 0)
    at = tl.max(tl.full([1], 2147483647, tl.int32), 0)
    for start in range(split * share, tl.minimum(split * share + share, vocab_size), BLOCK):
        token = start + v
        x = scaled(logits_RV + row * row_stride, token, token < vocab_size, temperature, 1.0)
        if CUT:
            x = tl.where(passes_cuts(x, token, tl.load(threshold_R + row), tl.load(last_R + row)), x, float("-inf"))
        if temperature > 0:
            best, at = better(x, words(seed, position, 0, start // 4 + tl.arange(0, BLOCK // 4)), token, best, at)
        else:
            top = tl.max(x, 0).to(tl.float64)
            first = tl.min(tl.where(x.to(tl.float64) == top, token, 2147483647), 0)
            at = tl.where(top > best, first, at)
            best = tl.maximum(top, best)
    tl.store(best_RS + row * tl.num_programs(1) + split, best)
    tl.store(at_RS + row * tl.num_programs(1) + split, at)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(best_RS, at_RS, chosen_R, vocab_size, splits, BLOCK_S: tl.constexpr):
    """Find the best score over all splits of one row, and its token."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    best_S = tl.load(best_RS + row * splits + s, mask=s < splits, other=float("-inf"))
    at_S = tl.load(at_RS + row * splits + s, mask=s < splits, other=2147483647)
    at = tl.min(tl.where(best_S == tl.max(best_S, 0), at_S, 2147483647), 0)
    # A row that contains only -inf yields token 0, as argmax does.
    tl.store(chosen_R + row, tl.where(at < vocab_size, at, 0).to(tl.int64))


def choose(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    cuts: Cuts | None,
    *,
    block: int = BLOCK,
) -> Tensor:
    """Choose the tokens [R] of plain decoding as `reference.chosen_tokens` does.

    Rows of temperature 0 are greedy; ``cuts`` None truncates nothing. A row's logits must be contiguous.
    """
    rows, vocab_size = logits_RV.shape
    assert logits_RV.stride(1) == 1, "a row's logits must be contiguous"
    chosen_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    if not rows:
        return chosen_R
    blocks = triton.cdiv(vocab_size, block)
    share = triton.cdiv(blocks, min(triton.cdiv(4 * processors(logits_RV), rows), blocks))
    splits = triton.cdiv(blocks, share)
    best_RS = torch.empty(rows, splits, dtype=torch.float64, device=logits_RV.device)
    at_RS = torch.empty(rows, splits, dtype=torch.int32, device=logits_RV.device)
    _best_kernel[(rows, splits)](
        logits_RV,
        temperature_R,
        seed_R,
        position_R,
        temperature_R if cuts is None else cuts.threshold_R,
        at_RS if cuts is None else cuts.last_R,
        best_RS,
        at_RS,
        vocab_size,
        logits_RV.stride(0),
        share * block,
        CUT=cuts is not None,
        BLOCK=block,
        num_warps=4,
    )
    _combine_kernel[(rows,)](
        best_RS, at_RS, chosen_R, vocab_size, splits, BLOCK_S=triton.next_power_of_2(blocks), num_warps=1
    )
    return chosen_R
