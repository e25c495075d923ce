"""Tree attention over keys that are all in the paged cache, as the engine calls it.

The prefix and the keys of the tree occupy consecutive positions of a sequence, so one masked attention over them equals
the merged two passes of the reference. `prepare` computes the cache rows to read and the visible keys, which are the
same in every layer, once per pass.

`attend` then runs one of two paths. On a CPU it runs one attention per sequence and layer. It reads the cache in place
if the blocks of the sequence are contiguous; otherwise it copies them (a shared prefix, or a nearly full cache). On a
GPU it runs the Triton kernel, and for long prompt chunks what was measured to be faster (prefill.py).

Tensor suffixes as in reference.py; L keys of a sequence, R rows of the cache, G query heads per key-value head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_kernels import dispatch
from specdecode_kernels.rope_cache.reference import FP8, UNSCALED, Scales
from specdecode_kernels.tree_attention.gpu_pass import attend_on_gpu, plan_pass
from specdecode_kernels.tree_attention.reference import CAUSAL

if TYPE_CHECKING:
    from specdecode_kernels.tree_attention.plan import Plan
    from specdecode_kernels.tree_attention.prefill import Chunk

MOST_HEAD_DIM = 128
"""Largest head dimension on a GPU. Larger ones exceed the shared memory of a program (H100: 227 KiB, A100: 163, L40S:
99): with 256, blocks of keys and values take 128 to 192 KiB, and the queries of a tile up to 64 more."""


@dataclass(frozen=True, slots=True)
class Run:
    """One sequence of a pass: its queries, the cache rows of its keys, and an additive mask [G * Q, L] or None."""

    queries: slice
    rows: slice | Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class PerQueryRows:
    """Cache rows of the sequence of each query, [T, L], and a mask of the rows that the query sees."""

    row_TL: Tensor
    visible_TL: Tensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """Layer-independent input of `attend`: exactly one of `runs`, `per_query` and the kernel's `plan`.

    ``chunks`` are the last queries of a pass, if they take another way than the kernel; ``plan`` is then that of the
    queries before them, or None.
    """

    runs: tuple[Run, ...] = ()
    per_query: PerQueryRows | None = None
    plan: Plan | None = None
    chunks: tuple[Chunk, ...] = ()


def prepare(
    *,
    blocks: Sequence[Sequence[int]],
    block_table_BM: Tensor,
    block_size: int,
    query_counts: Sequence[int],
    key_bounds: Sequence[int],
    prefix_len_B: Tensor,
    ancestors_T: Tensor,
    key_starts: Sequence[int] | Tensor,
    dense: bool,
    groups: int,
    dtype: torch.dtype,
    one_by_one: bool = False,
    kv_heads: int = 8,
    head_dim: int = 0,
    chunk_keys: Sequence[int] = (),
) -> Prepared:
    """Compute the layer-independent input of `attend` for one pass, from the host's view of the batch.

    Query t of a sequence sees its prefix and, after it, the rows that ``ancestors`` names; `CAUSAL` means the rows up
    to its own. Every query must see at least one key.

    Args:
        blocks: Block numbers of each sequence.
        block_table_BM: The same on the device, padded.
        block_size: Positions per block.
        query_counts: Number of queries of each sequence.
        key_bounds: Upper bound of the number of keys of each sequence.
        prefix_len_B: Prefix lengths on the device.
        ancestors_T: Ancestor bit mask of each query (see README.md).
        key_starts: Number of the oldest keys of each sequence that are hidden; a tensor stays on a GPU.
        dense: True if the bounds are exact and every query sees every key from the start of its sequence.
        groups: Query heads per key-value head, H / K.
        dtype: Type of the additive masks.
        one_by_one: Attend sequence by sequence on a GPU too, where tests compare the kernel with it.
        kv_heads: Number of key-value heads, used to size the grid on a GPU.
        head_dim: Head dimension, by which a GPU looks up measured times.
        chunk_keys: Exact number of keys of each sequence that is a chunk of a prompt, else 0. Chunks are last.
    """
    if not one_by_one and dispatch.on_gpu(block_table_BM):
        plan, chunks = plan_pass(
            block_table_BM=block_table_BM,
            block_size=block_size,
            query_counts=query_counts,
            prefix_len_B=prefix_len_B,
            ancestors_T=ancestors_T,
            key_starts=key_starts,
            chunk_keys=chunk_keys,
            heads=(groups * kv_heads, kv_heads, head_dim),
            dtype=dtype,
        )
        return Prepared(plan=plan, chunks=chunks)
    if isinstance(key_starts, Tensor):
        key_starts = key_starts.tolist()
    visible_TL = None
    if not dense:
        visible_TL = _visible(query_counts, max(key_bounds), prefix_len_B, ancestors_T, key_starts)
    runs = []
    end = 0
    for owned, count, first, bound in zip(blocks, query_counts, key_starts, key_bounds, strict=True):
        start, end = end, end + count
        mask = None
        if visible_TL is not None:
            mask = _additive(visible_TL[start:end, first:bound], dtype).repeat(groups, 1)
        rows = _rows(owned, block_size, first, bound, block_table_BM.device)
        runs.append(Run(slice(start, end), rows, mask))
    return Prepared(tuple(runs))


def prepare_tables(
    *,
    query_start: Tensor,
    prefix_len_B: Tensor,
    key_start_B: Tensor,
    ancestors_T: Tensor,
    block_table_BM: Tensor,
    block_size: int,
    groups: int,
    kv_heads: int,
) -> Prepared:
    """Compute the layer-independent input of `attend` for one pass, from device tensors only.

    Because no host value is used, a captured graph stays valid for any later contents of the tensors. Sequences without
    queries are padding; queries from ``query_start[B]`` on are padding too and get zeros. Without a GPU, every query
    reads all positions that its sequence could hold; that path is meant for small tests.
    """
    if dispatch.on_gpu(block_table_BM):
        from specdecode_kernels.tree_attention.plan import plan

        return Prepared(
            plan=plan(
                query_start=query_start,
                prefix_len_B=prefix_len_B,
                key_start_B=key_start_B,
                ancestors_T=ancestors_T,
                block_table_BM=block_table_BM,
                block_size=block_size,
                groups=groups,
                kv_heads=kv_heads,
            )
        )
    query_T = torch.arange(len(ancestors_T), device=ancestors_T.device)
    sequence_T = (query_start[None, 1:] <= query_T[:, None]).sum(-1)
    padding_T1 = (sequence_T == len(prefix_len_B))[:, None]
    sequence_T = sequence_T.clamp(max=len(prefix_len_B) - 1)
    key_L = torch.arange(block_table_BM.shape[1] * block_size, device=ancestors_T.device)
    row_TL = block_table_BM[sequence_T][:, key_L // block_size] * block_size + key_L % block_size
    seen_TL = _seen(key_L, query_T - query_start[sequence_T], prefix_len_B[sequence_T], ancestors_T)
    started_TL = key_L >= key_start_B[sequence_T, None]
    return Prepared(per_query=PerQueryRows(row_TL, seen_TL & started_TL & ~padding_T1))


def attend(q_THD: Tensor, cache_2NPKD: Tensor, prepared: Prepared, scales: Scales = UNSCALED) -> Tensor:
    """Compute attended values [T, H, D] of one layer. The keys and values of this pass must be in the cache already.

    ``scales`` are those of a cache in fp8. They multiply queries and results instead of each key and value.
    """
    if prepared.plan is not None or prepared.chunks:
        return attend_on_gpu(q_THD, cache_2NPKD, prepared.plan, prepared.chunks, scales)
    if cache_2NPKD.dtype == FP8:
        return _attend(q_THD * scales.key, cache_2NPKD, prepared) * scales.value
    return _attend(q_THD, cache_2NPKD, prepared)


def _attend(q_THD: Tensor, cache_2NPKD: Tensor, prepared: Prepared) -> Tensor:
    """Attend over the numbers of the cache without a GPU."""
    k_RKD, v_RKD = cache_2NPKD.flatten(1, 2)
    if prepared.per_query is not None:
        return _attend_per_query(q_THD, k_RKD, v_RKD, prepared.per_query)
    parts = []
    for run in prepared.runs:
        k_LKD, v_LKD = (_picked(rows, run.rows, q_THD.dtype) for rows in (k_RKD, v_RKD))
        parts.append(_attend_run(q_THD[run.queries], k_LKD, v_LKD, run.mask))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _picked(x_RKD: Tensor, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
    """Return cache rows in ``dtype``, as a view if they are a slice of a cache of that type."""
    if isinstance(rows, slice):
        return x_RKD[rows].to(dtype)
    if x_RKD.dtype == FP8:  # no indexing of fp8 on a CPU
        return x_RKD.view(torch.uint8)[rows].view(FP8).to(dtype)
    return x_RKD[rows]


def _attend_run(q_QHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, mask: Tensor | None) -> Tensor:
    """Attend one sequence; the query heads of one key-value head become rows, so that no key is repeated."""
    queries, heads, size = q_QHD.shape
    kv = k_LKD.shape[1]
    if queries == 1:
        q = q_QHD.view(1, kv, heads // kv, size)
    else:
        q = q_QHD.view(queries, kv, heads // kv, size).permute(1, 2, 0, 3).reshape(1, kv, -1, size)
    out = F.scaled_dot_product_attention(q, k_LKD.transpose(0, 1)[None], v_LKD.transpose(0, 1)[None], attn_mask=mask)
    if queries == 1:
        return out.reshape(1, heads, size)
    return out.view(kv, heads // kv, queries, size).permute(2, 0, 1, 3).reshape(queries, heads, size)


def _attend_per_query(q_THD: Tensor, k_RKD: Tensor, v_RKD: Tensor, plan: PerQueryRows) -> Tensor:
    """Attend every query over its own gathered rows.

    Hidden keys and values are replaced by zeros, because unused slots may hold NaN and NaN times zero is NaN.
    """
    tokens, heads, size = q_THD.shape
    seen = plan.visible_TL
    k_TLKD, v_TLKD = (
        _picked(rows, plan.row_TL, q_THD.dtype).masked_fill(~seen[:, :, None, None], 0.0) for rows in (k_RKD, v_RKD)
    )
    q_TKGD = q_THD.view(tokens, k_RKD.shape[1], -1, size)
    scores_TKGL = torch.einsum("tkgd,tlkd->tkgl", q_TKGD, k_TLKD) / math.sqrt(size)
    weights_TKGL = torch.softmax(scores_TKGL.masked_fill(~seen[:, None, None], -math.inf), dim=-1)
    weights_TKGL = weights_TKGL.masked_fill(~seen[:, None, None], 0.0)
    return torch.einsum("tkgl,tlkd->tkgd", weights_TKGL, v_TLKD).reshape(tokens, heads, size)


def _seen(key_L: Tensor, own_row_T: Tensor, prefix_len_T: Tensor, ancestors_T: Tensor) -> Tensor:
    """Return a bool mask [T, L] of the prefix plus the rows on the query's path (causal: the rows up to its own)."""
    behind_TL = key_L - prefix_len_T[:, None]
    in_tree = (ancestors_T[:, None] >> behind_TL.clamp(0, 63)) & 1 == 1
    causal = behind_TL <= own_row_T[:, None]
    own_rows = torch.where((ancestors_T == CAUSAL)[:, None], causal, in_tree & (behind_TL < 64))
    return (behind_TL < 0) | own_rows


def _visible(
    query_counts: Sequence[int], keys: int, prefix_len_B: Tensor, ancestors_T: Tensor, key_starts: Sequence[int]
) -> Tensor:
    """Return a bool mask [T, L] of the keys that each query sees."""
    device = ancestors_T.device
    counts_B = torch.tensor(query_counts, device=device)
    sequence_T = torch.repeat_interleave(counts_B, output_size=len(ancestors_T))
    own_row_T = torch.arange(len(ancestors_T), device=device) - (counts_B.cumsum(0) - counts_B)[sequence_T]
    key_L = torch.arange(keys, device=device)
    visible = _seen(key_L, own_row_T, prefix_len_B[sequence_T], ancestors_T)
    if any(key_starts):
        visible &= key_L >= torch.tensor(key_starts, device=device)[sequence_T, None]
    return visible


def _rows(blocks: Sequence[int], block_size: int, first: int, bound: int, device: torch.device) -> slice | Tensor:
    """Return the cache rows of a sequence's keys from ``first`` on, as a slice if its blocks are contiguous."""
    read = blocks[: -(-bound // block_size)]
    if read[-1] - read[0] == len(read) - 1 and all(b > a for a, b in pairwise(read)):
        return slice(read[0] * block_size + first, read[0] * block_size + bound)
    key_L = torch.arange(first, bound, device=device)
    return torch.tensor(read, device=device)[key_L // block_size] * block_size + key_L % block_size


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask: 0 for visible keys, -inf for hidden ones."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -math.inf)
