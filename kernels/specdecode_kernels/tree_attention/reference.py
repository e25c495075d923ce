"""Reference implementation of tree attention in plain PyTorch.

Defines the result that the kernel and the other code paths are tested against.

Tensor suffixes: T packed queries, S suffix keys, H query heads, K key-value heads, D head dimension, B sequences, M
blocks of a sequence, N blocks of the cache, P positions of a block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CAUSAL = 0
"""Value of ``ancestors`` for a token of a prefill chunk. A tree node always has its own bit set, so 0 is free."""


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
    """Compute attention of every packed query over its paged prefix and its visible suffix rows.

    Computed in fp32 (fp64 inputs stay fp64) as two passes that are merged by their log-sum-exp; see README.md. All
    indices are int64. A query without any visible key yields zeros.

    Args:
        q_THD: Queries. Sequence b owns queries ``query_start[b]`` to ``query_start[b + 1]``.
        cache_2NPKD: Keys and values of one layer. The prefix of sequence b is the first ``prefix_len[b]`` keys of its
            blocks; all of its queries see it.
        block_table_BM: Block numbers of every sequence.
        prefix_len_B: Number of keys in the prefix.
        query_start: First packed query of every sequence and the end of the last one, [B + 1].
        k_SKD: Suffix keys. Sequence b owns ``suffix_len[b]`` rows from ``suffix_start[b]``.
        v_SKD: Suffix values.
        suffix_start_B: First suffix row of every sequence.
        suffix_len_B: Number of suffix rows.
        ancestors_T: Bit mask per query: a query sees suffix row j if bit j is set. ``CAUSAL`` means every row up to its
            own, where the queries are the last rows of the suffix.

    Returns:
        Attended values, [T, H, D].
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
    """Return the first ``length`` keys and values of one sequence, [length, K, D] each, gathered from its blocks."""
    size = cache_2NPKD.shape[2]
    used = blocks_M[: -(-length // size)]
    k, v = cache_2NPKD[:, used].flatten(1, 2)[:, :length]
    return k, v


def suffix_mask(ancestors_Q: Tensor, suffix_len: int) -> Tensor:
    """Return which suffix rows each query of a sequence sees, as a bool mask [Q, suffix_len]."""
    rows = torch.arange(suffix_len, device=ancestors_Q.device)
    count = ancestors_Q.shape[0]
    own_row_Q = torch.arange(count, device=ancestors_Q.device) + (suffix_len - count)
    causal = rows[None, :] <= own_row_Q[:, None]
    tree = (ancestors_Q[:, None] >> rows.clamp(max=63)[None, :]) & 1 == 1
    return torch.where((ancestors_Q == CAUSAL)[:, None], causal, tree)


def attend_masked(q_QHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, visible_QL: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute one attention pass: (values [Q, H, D], natural log-sum-exp [Q, H]).

    ``visible_QL`` None means that every query sees every key. A query without a visible key gives zeros and -inf.
    """
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
    """Merge two passes into one softmax over the keys of both, from their values and natural log-sum-exps."""
    (values_a, lse_a), (values_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    lse = lse.masked_fill(lse == -math.inf, 0)
    return torch.exp(lse_a - lse)[..., None] * values_a + torch.exp(lse_b - lse)[..., None] * values_b
