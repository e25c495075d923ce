"""What tree attention computes, in plain torch: the definition that kernels are held against.

Suffixes: T packed queries, S suffix keys, H query heads, K key-value heads, D head dimension, B sequences,
M blocks of a sequence, N blocks of the cache, P positions of a block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CAUSAL = 0
"""``ancestors`` of a token of a prefill chunk. A tree's node always has its own bit, so 0 is free to mean this."""


def tree_attention(
    q_THD: Tensor,
    cache_2NPKD: Tensor,
    block_table_BM: Tensor,
    prefix_len_B: Tensor,
    query_start: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    suffix_start_B: Tensor,
    suffix_len_B: Tensor,
    ancestors_T: Tensor,
) -> Tensor:
    """Attended values [T, H, D] of every packed query, computed in fp32 (fp64 stays fp64).

    Sequence b owns queries ``query_start[b]`` to ``query_start[b + 1]``, the first ``prefix_len[b]`` keys of its
    blocks, and ``suffix_len[b]`` rows of the suffix from ``suffix_start[b]``. The prefix is seen by all of its
    queries. Of the suffix, a query sees node j when bit j of its ``ancestors`` is set; ``CAUSAL`` means every row up
    to its own, queries being the last rows of the suffix. Int64 indices throughout.

    Two passes, merged by their log-sum-exp: see README.md. A query that sees no key at all yields zeros.
    """
    out_THD = torch.empty_like(q_THD)
    for b in range(prefix_len_B.shape[0]):
        queries = slice(int(query_start[b]), int(query_start[b + 1]))
        start, length = int(suffix_start_B[b]), int(suffix_len_B[b])
        suffix = slice(start, start + length)
        k_prefix, v_prefix = gather_prefix(cache_2NPKD, block_table_BM[b], int(prefix_len_B[b]))
        over_prefix = attend_masked(q_THD[queries], k_prefix, v_prefix, None)
        visible = suffix_mask(ancestors_T[queries], length)
        over_suffix = attend_masked(q_THD[queries], k_SKD[suffix], v_SKD[suffix], visible)
        out_THD[queries] = merge(over_prefix, over_suffix).to(q_THD.dtype)
    return out_THD


def gather_prefix(cache_2NPKD: Tensor, blocks_M: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The first ``length`` keys and values of one sequence, [length, K, D] each, out of its blocks."""
    size = cache_2NPKD.shape[2]
    used = blocks_M[: -(-length // size)]
    k, v = cache_2NPKD[:, used].flatten(1, 2)[:, :length]
    return k, v


def suffix_mask(ancestors_Q: Tensor, suffix_len: int) -> Tensor:
    """[Q, suffix_len] bool: which suffix rows each of a sequence's queries sees."""
    rows = torch.arange(suffix_len, device=ancestors_Q.device)
    count = ancestors_Q.shape[0]
    own_row_Q = torch.arange(count, device=ancestors_Q.device) + (suffix_len - count)
    causal = rows[None, :] <= own_row_Q[:, None]
    tree = (ancestors_Q[:, None] >> rows.clamp(max=63)[None, :]) & 1 == 1
    return torch.where((ancestors_Q == CAUSAL)[:, None], causal, tree)


def attend_masked(q_QHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, visible_QL: Tensor | None) -> tuple[Tensor, Tensor]:
    """(values [Q, H, D], log-sum-exp [Q, H]) of one pass; nothing visible gives zeros and -inf."""
    wide = torch.promote_types(q_QHD.dtype, torch.float32)
    groups = q_QHD.shape[1] // k_LKD.shape[1]
    k_LHD = k_LKD.to(wide).repeat_interleave(groups, dim=1)
    v_LHD = v_LKD.to(wide).repeat_interleave(groups, dim=1)
    scores_HQL = torch.einsum("qhd,lhd->hql", q_QHD.to(wide), k_LHD) / math.sqrt(q_QHD.shape[-1])
    if visible_QL is not None:
        scores_HQL = scores_HQL.masked_fill(~visible_QL, -math.inf)
    lse_HQ = torch.logsumexp(scores_HQL, dim=-1)
    weights_HQL = torch.exp(scores_HQL - lse_HQ.masked_fill(lse_HQ == -math.inf, 0)[..., None])
    return torch.einsum("hql,lhd->qhd", weights_HQL, v_LHD), lse_HQ.T


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """One softmax over the keys of both passes, from each pass's values and log-sum-exp (natural log)."""
    (values_a, lse_a), (values_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    lse = lse.masked_fill(lse == -math.inf, 0)
    return torch.exp(lse_a - lse)[..., None] * values_a + torch.exp(lse_b - lse)[..., None] * values_b
