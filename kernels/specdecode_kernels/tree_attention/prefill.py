"""Attention of long prompt chunks on a GPU by other code than our kernel, where that was measured to be faster.

A way copies the keys and values of a sequence out of the cache and attends to them causally. Ways are those of torch:
others (FlashInfer, FlashAttention-3) are functions of the same signature in WAYS, once they can be tested.

Tensor suffixes: Q queries of the chunk, L keys of its sequence, H heads, K key-value heads, D head dimension, M blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_kernels import timings

OURS = "kernel"
"""Name of our kernel in the timings."""
LEAST_QUERIES = 256
"""Fewest queries of a chunk for another way: with fewer, the copy of the keys costs more than attention."""
MOST_COPIED_BYTES = 2**27
"""Most memory for the copied keys and values of a sequence: 32,768 keys of Llama-3.1-8B in bf16."""
DTYPES = (torch.bfloat16, torch.float16)
"""Types with a choice; fp32 always takes our kernel."""

Mask = Any
"""Causal mask of a chunk in the form that its way takes."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to compute the attention of a chunk.

    ``mask`` makes the causal mask of a chunk from the numbers of queries and keys, once for all layers. ``attend``
    takes queries [1, H, Q, D], keys and values [1, K, L, D] and the mask, and returns [1, H, Q, D]. Query q sees the
    keys up to L - Q + q.
    """

    mask: Callable[[int, int, torch.device], Mask]
    attend: Callable[[Tensor, Tensor, Tensor, Mask], Tensor]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a pass: its queries, the cache blocks and the number of keys of its sequence, and its way."""

    queries: slice
    blocks_M: Tensor
    keys: int
    way: Way
    mask: Mask


def _sdpa(q_1HQD: Tensor, k_1KLD: Tensor, v_1KLD: Tensor, mask: Mask) -> Tensor:
    return F.scaled_dot_product_attention(q_1HQD, k_1KLD, v_1KLD, attn_mask=mask, enable_gqa=True)


def _sdpa_mask(queries: int, keys: int, device: torch.device) -> Mask:
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(queries, keys)


WAYS: dict[str, Way] = {"sdpa": Way(_sdpa_mask, _sdpa)}
"""Ways beside our kernel, by their names in the timings: torch's scaled_dot_product_attention."""


def choose(heads: int, kv_heads: int, head_dim: int, queries: int, keys: int, dtype: torch.dtype) -> str:
    """Return the name of the fastest measured way for a chunk; OURS without a measurement."""
    copied = 2 * keys * kv_heads * head_dim * dtype.itemsize
    if dtype not in DTYPES or queries < LEAST_QUERIES or copied > MOST_COPIED_BYTES:
        return OURS
    measured = timings.current().prefill
    return timings.fastest(measured, (heads, kv_heads, head_dim), keys, (OURS, *WAYS)) or OURS


def warm_up(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Run the ways that may be chosen for a model, so that what they compile is compiled before the first request.

    Returns:
        The names of these ways.
    """
    cases = [case for case in timings.current().prefill if case.key == (heads, kv_heads, head_dim)]
    chosen = {choose(heads, kv_heads, head_dim, LEAST_QUERIES, case.size, dtype) for case in cases} - {OURS}
    for name in sorted(chosen):
        for queries, keys in ((LEAST_QUERIES, 2 * LEAST_QUERIES), (LEAST_QUERIES + 64, LEAST_QUERIES + 64)):
            way = WAYS[name]
            k_1KLD = torch.zeros(1, kv_heads, keys, head_dim, dtype=dtype, device=device)
            q_1HQD = torch.zeros(1, heads, queries, head_dim, dtype=dtype, device=device)
            way.attend(q_1HQD, k_1KLD, k_1KLD, way.mask(queries, keys, device))
    return sorted(chosen)


def last_chunks(
    chunk_keys: Sequence[int],
    query_counts: Sequence[int],
    block_table_BM: Tensor,
    block_size: int,
    choose_way: Callable[[int, int], str],
) -> list[Chunk]:
    """Return the chunks at the end of a batch that take another way than our kernel.

    Args:
        chunk_keys: Number of keys of each sequence that is a chunk, those of the pass included; 0 for other sequences.
        query_counts: Number of queries of each sequence.
        block_table_BM: Cache blocks of each sequence.
        block_size: Positions per block.
        choose_way: Function from the numbers of queries and keys of a chunk to the name of its way.
    """
    chunks: list[Chunk] = []
    end = sum(query_counts)
    for b in reversed(range(len(chunk_keys))):
        count, keys = query_counts[b], chunk_keys[b]
        name = choose_way(count, keys) if keys else OURS
        if name == OURS:
            break
        way = WAYS[name]
        blocks_M = block_table_BM[b, : -(-keys // block_size)]
        chunks.append(Chunk(slice(end - count, end), blocks_M, keys, way, way.mask(count, keys, blocks_M.device)))
        end -= count
    return chunks[::-1]


def attend(q_THD: Tensor, cache_2NPKD: Tensor, chunk: Chunk) -> Tensor:
    """Return the attended values [Q, H, D] of one chunk."""
    k_1KLD, v_1KLD = (
        half.index_select(0, chunk.blocks_M).flatten(0, 1)[: chunk.keys].transpose(0, 1)[None] for half in cache_2NPKD
    )
    q_1HQD = q_THD[chunk.queries].transpose(0, 1)[None]
    return chunk.way.attend(q_1HQD, k_1KLD, v_1KLD, chunk.mask)[0].transpose(0, 1)
