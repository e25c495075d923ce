"""Multi-round speculative sampling on a GPU, one program per tree (README.md).

As long as children are accepted, only their own probabilities are read. A rejection computes the residual in two passes
over the vocabulary; the bonus token takes one more pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.noise.kernel import words
from specdecode_kernels.noise.reference import COIN_STREAM, RESIDUAL_STREAM
from specdecode_kernels.verify.kernel import BLOCK, better
from specdecode_kernels.verify.reference import Accepted


@triton.jit
def _probability(log_V, left_V, token, inside, made):
    """Load probabilities from the residual if one was computed, else from the log-probabilities."""
    made_V = made + 0 * token  # all masks need one shape: the interpreter does not broadcast booleans
    whole = tl.exp(tl.load(log_V + token, mask=inside & (made_V == 0), other=float("-inf")))
    return whole + tl.load(left_V + token, mask=inside & (made_V == 1), other=0.0)


@triton.jit
def _without(p, q, token, x, from_q):
    """Return (p, q), not normalised, after x was rejected."""
    left = tl.where(from_q > 0, tl.maximum(p - q, 0.0), tl.where(token == x, 0.0, p))
    return left, tl.where(token == x, 0.0, q)


@triton.jit
def _shrink(logp_V, logq_V, p_V, q_V, x, from_q, drawn, made, vocab_size, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Write the normalised residuals of p and q after x was rejected.

    If rounding leaves nothing of p, p stays unchanged.
    """
    v = tl.arange(0, BLOCK)
    total = tl.sum(tl.zeros([1], WIDE), 0)
    total_q = tl.sum(tl.zeros([1], WIDE), 0)
    for start in range(0, vocab_size, BLOCK):
        inside = start + v < vocab_size
        p = _probability(logp_V, p_V, start + v, inside, made)
        q = _probability(logq_V, q_V, start + v, inside & (drawn + 0 * v > 0), made)
        left, left_q = _without(p, q, start + v, x, from_q)
        total += tl.sum(left, 0)
        total_q += tl.sum(left_q, 0)
    for start in range(0, vocab_size, BLOCK):
        inside = start + v < vocab_size
        p = _probability(logp_V, p_V, start + v, inside, made)
        q = _probability(logq_V, q_V, start + v, inside & (drawn + 0 * v > 0), made)
        left, left_q = _without(p, q, start + v, x, from_q)
        tl.store(p_V + start + v, tl.where(total > 0, left / total, p), mask=inside)
        tl.store(q_V + start + v, tl.where(total_q > 0, left_q / total_q, left_q), mask=inside)
    # Another thread may read an element next.
    tl.debug_barrier()


@triton.jit(
    do_not_specialize=[
        "parents_BN",
        "tokens_BN",
        "drawn_BM",
        "seed_B",
        "position_B",
        "nodes",
        "drawn_nodes",
        "depth",
        "width",
    ]
)
def _rounds_kernel(
    parents_BN,
    tokens_BN,
    logp_BNV,
    logq_BMV,
    drawn_BM,
    seed_B,
    position_B,
    p_BV,
    q_BV,
    path_BD,
    count_B,
    bonus_B,
    nodes,
    drawn_nodes,
    vocab_size,
    depth,
    width,
    HAS_Q: tl.constexpr,
    COINS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run multi-round sampling on one tree."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    v = tl.arange(0, BLOCK)
    parent_N = tl.load(parents_BN + row * nodes + n, mask=n < nodes, other=-1)
    token_N = tl.load(tokens_BN + row * nodes + n, mask=n < nodes, other=0)
    seed, position = tl.load(seed_B + row), tl.load(position_B + row)
    p_V, q_V = p_BV + row * vocab_size, q_BV + row * vocab_size
    at, taken, count = tl.min(n, 0), tl.min(n, 0), tl.min(n, 0)
    for level in range(depth + 1):
        if taken >= 0:
            here = position + 1 + level
            logp_V = logp_BNV + (row * nodes + at) * vocab_size
            logq_V = logq_BMV + (row * drawn_nodes + at) * vocab_size
            drawn = tl.min(n, 0)
            if HAS_Q:
                drawn += tl.load(drawn_BM + row * drawn_nodes + at).to(tl.int32)
            coin_N = (
                words(seed, here, COINS, tl.arange(0, BLOCK_N // 4)).to(tl.float64) + 0.5
            ) * 2.3283064365386963e-10
            made, child, taken = tl.min(n, 0), tl.min(n, 0), tl.min(n, 0) - 1
            for _ in range(width):
                # Node 0 is the root and no child; parents precede their children.
                child = tl.min(tl.where((parent_N == at) & (n > child), n, BLOCK_N), 0)
                if (child < BLOCK_N) & (taken < 0):
                    x = tl.maximum(tl.sum(tl.where(n == child, token_N, 0), 0), 0)
                    p_x = _probability(logp_V, p_V, x, x >= 0, made)
                    q_x = _probability(logq_V, q_V, x, (x >= 0) & (drawn > 0), made)
                    chance = tl.where(q_x > 0, p_x / tl.where(q_x > 0, q_x, 1.0), p_x)
                    coin = tl.sum(tl.where(n == child, coin_N, 0.0), 0)
                    if coin < chance.to(tl.float64):
                        taken = child
                    else:
                        from_q = tl.where(q_x > 0, 1, 0)
                        _shrink(logp_V, logq_V, p_V, q_V, x, from_q, drawn, made, vocab_size, WIDE, BLOCK)
                        made = tl.min(n, 0) + 1
            if taken >= 0:
                at = taken
                count += 1
            else:
                best = tl.max(tl.full([1], float("-inf"), tl.float64), 0)
                bonus = tl.min(n, 0)
                for start in range(0, vocab_size, BLOCK):
                    p = _probability(logp_V, p_V, start + v, start + v < vocab_size, made)
                    bits = words(seed, here, RESIDUAL, start // 4 + tl.arange(0, BLOCK // 4))
                    best, bonus = better(tl.log(p).to(tl.float32), bits, start + v, best, bonus)
                tl.store(bonus_B + row, bonus.to(tl.int64))
            if level < depth:
                tl.store(path_BD + row * depth + level, taken.to(tl.int64))
        else:
            if level < depth:
                tl.store(path_BD + row * depth + level, tl.min(n, 0).to(tl.int64) - 1)
    tl.store(count_B + row, count.to(tl.int64))


def multi_round(
    parents_BN: Tensor,
    tokens_BN: Tensor,
    logp_BNV: Tensor,
    logq_BMV: Tensor | None,
    seed_B: Tensor,
    position_B: Tensor,
    depth: int,
    drawn_BM: Tensor | None,
    width: int,
    *,
    block: int = BLOCK,
) -> Accepted:
    """Run `op.multi_round` as one launch. ``drawn_BM`` must be given if ``logq_BMV`` is."""
    (batch, nodes), vocab_size, device = parents_BN.shape, logp_BNV.shape[-1], parents_BN.device
    path_BD = torch.empty(batch, depth, dtype=torch.int64, device=device)
    count_B, bonus_B = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
    left_2BV = torch.empty(2, batch, vocab_size, dtype=logp_BNV.dtype, device=device)
    logq = logp_BNV if logq_BMV is None else logq_BMV.to(logp_BNV.dtype)
    drawn = parents_BN if drawn_BM is None else drawn_BM.to(torch.int32)
    if batch:
        _rounds_kernel[(batch,)](
            parents_BN.contiguous(),
            tokens_BN.contiguous(),
            logp_BNV.contiguous(),
            logq.contiguous(),
            drawn.contiguous(),
            seed_B.contiguous(),
            position_B.contiguous(),
            left_2BV[0],
            left_2BV[1],
            path_BD,
            count_B,
            bonus_B,
            nodes,
            logq.shape[1],
            vocab_size,
            depth,
            width,
            HAS_Q=logq_BMV is not None,
            COINS=COIN_STREAM,
            RESIDUAL=RESIDUAL_STREAM,
            WIDE=tl.float64 if logp_BNV.dtype == torch.float64 else tl.float32,
            BLOCK_N=max(triton.next_power_of_2(nodes), 4),
            BLOCK=block,
            num_warps=8,
        )
    return Accepted(path_BD, count_B, bonus_B)
