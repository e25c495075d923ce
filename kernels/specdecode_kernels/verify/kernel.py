"""Verification on a GPU: the target's token after every node, and the coupled walk (README.md).

Multi-round sampling is in rounds.py. Tensor suffixes: R rows, V vocabulary, S splits of a row, B sequences, N nodes, D
depth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.dispatch import processors
from specdecode_kernels.noise.kernel import exact_gumbel, quick_gumbel, words
from specdecode_kernels.sample.kernel import Cuts, passes_cuts, scaled
from specdecode_kernels.verify.reference import Accepted

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


@triton.jit(do_not_specialize=["parents_BN", "tokens_BN", "chosen_BN", "nodes", "depth"])
def _walk_kernel(
    parents_BN, tokens_BN, chosen_BN, path_BD, count_B, bonus_B, last_B, nodes, depth, BLOCK_N: tl.constexpr
):
    """Walk one tree along the chosen tokens."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    real = n < nodes
    parent_N = tl.load(parents_BN + row * nodes + n, mask=real, other=-1)
    token_N = tl.load(tokens_BN + row * nodes + n, mask=real, other=-1)
    chosen_N = tl.load(chosen_BN + row * nodes + n, mask=real, other=-1)
    at = tl.min(n, 0)
    count = tl.min(n, 0)
    for step in range(depth):
        wanted = tl.sum(tl.where(n == at, chosen_N, 0), 0)
        hit_N = real & (parent_N == at) & (token_N == wanted)
        child = tl.min(tl.where(hit_N, n, BLOCK_N), 0)
        # A walk that has stopped stops in every later step too, since its node and wanted token do not change.
        goes = child < BLOCK_N
        tl.store(path_BD + row * depth + step, tl.where(goes, child, -1).to(tl.int64))
        at = tl.where(goes, child, at)
        count += tl.where(goes, 1, 0)
    tl.store(count_B + row, count.to(tl.int64))
    tl.store(bonus_B + row, tl.sum(tl.where(n == at, chosen_N, 0), 0))
    tl.store(last_B + row, at.to(tl.int64))


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


def walk(parents_BN: Tensor, tokens_BN: Tensor, chosen_BN: Tensor, max_depth: int) -> Accepted:
    """Walk the trees as `reference.walk` does, one program per sequence."""
    batch, nodes = parents_BN.shape
    path_BD = torch.empty(batch, max_depth, dtype=torch.int64, device=parents_BN.device)
    count_B, bonus_B, last_B = (torch.empty(batch, dtype=torch.int64, device=parents_BN.device) for _ in range(3))
    if batch:
        _walk_kernel[(batch,)](
            parents_BN.contiguous(),
            tokens_BN.contiguous(),
            chosen_BN.contiguous(),
            path_BD,
            count_B,
            bonus_B,
            last_B,
            nodes,
            max_depth,
            BLOCK_N=triton.next_power_of_2(nodes),
            num_warps=1,
        )
    return Accepted(path_BD, count_B, bonus_B, last_B)
