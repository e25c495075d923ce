"""One pass of attention on a GPU: our kernel for all queries, or other ways for the prompt chunks at its end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdecode_kernels.rope_cache.reference import UNSCALED, Scales
from specdecode_kernels.transfer import to_device
from specdecode_kernels.tree_attention import prefill
from specdecode_kernels.tree_attention.prefill import Chunk

if TYPE_CHECKING:
    from specdecode_kernels.tree_attention.plan import Plan


def plan_pass(
    *,
    block_table_BM: Tensor,
    block_size: int,
    query_counts: Sequence[int],
    prefix_len_B: Tensor,
    ancestors_T: Tensor,
    key_starts: Sequence[int] | Tensor,
    chunk_keys: Sequence[int],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
) -> tuple[Plan | None, tuple[Chunk, ...]]:
    """Return the kernel's plan and the chunks that take other ways; no plan if all queries are in such chunks.

    ``heads`` are the numbers of query heads and key-value heads, and the head dimension; the rest is as in
    `op.prepare`. Code that replays a captured graph keeps counts and starts as device tensors and calls `plan` itself.
    """
    from specdecode_kernels.tree_attention.plan import plan

    choose_way = partial(prefill.choose, *heads, dtype=dtype)
    chunks = prefill.last_chunks(chunk_keys, query_counts, block_table_BM, block_size, choose_way)
    batch = len(query_counts) - len(chunks)
    if not batch:
        return None, tuple(chunks)
    starts = list(accumulate(query_counts[:batch], initial=0))
    device = block_table_BM.device
    if not isinstance(key_starts, Tensor):
        key_starts = to_device(key_starts, device, dtype=torch.int64)
    made = plan(
        query_start=to_device(starts, device),
        prefix_len_B=prefix_len_B[:batch],
        key_start_B=key_starts[:batch],
        ancestors_T=ancestors_T[: starts[-1]],
        block_table_BM=block_table_BM[:batch],
        block_size=block_size,
        groups=heads[0] // heads[1],
        kv_heads=heads[1],
    )
    return made, tuple(chunks)


def attend_on_gpu(
    q_THD: Tensor, cache_2NPKD: Tensor, plan: Plan | None, chunks: Sequence[Chunk], scales: Scales = UNSCALED
) -> Tensor:
    """Attend by our kernel, and the chunks at the end by their ways."""
    parts = []
    if plan is not None:
        from specdecode_kernels.tree_attention import kernel

        before = chunks[0].queries.start if chunks else len(q_THD)
        parts.append(kernel.attend(q_THD[:before], cache_2NPKD, plan, scales))
    parts += [prefill.attend(q_THD, cache_2NPKD, chunk) for chunk in chunks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
