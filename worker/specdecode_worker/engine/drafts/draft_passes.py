"""Passes of a draft with a KV cache of its own: runs of consecutive slots, and levels of trees.

Draft slot i belongs to token i and proposes token i + 1. The keys of a tree follow those of the root, as in the
target's cache. They are rewritten once their tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.engine.batch import Row
from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.engine.step.packed_batch import PackedBatch, slots_of, spread
from specdecode_worker.speculation.trees import Forest, Level

FirstKey = Callable[[Request], int]


def causal_pass(
    state: DeviceState,
    requests: Sequence[Request],
    counts: Sequence[int],
    first_B: Tensor,
    last_position: int,
    *,
    first_key: FirstKey,
) -> PackedBatch:
    """Build the pass over ``counts[b]`` consecutive draft slots of each request, from ``first_B[b]`` on.

    Args:
        state: Device state of the running requests.
        requests: Requests of the pass, B of them.
        counts: Number of slots of each request.
        first_B: First slot of each request, on the device.
        last_position: Last position that the draft supports; later positions are clamped to it.
        first_key: Function that returns the first slot of a request whose keys the draft attends to.
    """
    device = first_B.device
    slots_B = to_device([request.slot for request in requests], device)
    sequence_T, row_T = spread(tuple(counts), device)
    index_T = first_B[sequence_T] + row_T
    table_BM = state.block_table_SM[slots_B]
    # During prefill, a request owns blocks only for the tokens launched so far; the last of them has the last slot.
    bounds = tuple(
        min(max(request.cached_bound, request.prefilled) + 1, len(request.blocks) * BLOCK_SIZE) for request in requests
    )
    return PackedBatch(
        tokens_T=state.tokens_SP[slots_B[sequence_T], index_T],
        positions_T=index_T.clamp(max=last_position),
        slots_T=slots_of(table_BM, sequence_T, index_T),
        prefix_len_B=first_B,
        ancestors_T=torch.zeros_like(index_T),
        block_table_BM=table_BM,
        blocks=tuple(tuple(request.blocks) for request in requests),
        query_counts=tuple(counts),
        key_bounds=bounds,
        key_starts=tuple(first_key(request) for request in requests),
        dense=False,
    )


def level_pass(
    state: DeviceState,
    rows: Sequence[Row],
    level: Level,
    depth: int,
    forest: Forest,
    last_position: int,
    *,
    first_key: FirstKey,
) -> PackedBatch:
    """Build the pass over the nodes of one level of the trees.

    Args:
        state: Device state of the running requests.
        rows: Rows of the step.
        level: Nodes to run.
        depth: Depth of the level; the root has depth 0.
        forest: Trees of the step.
        last_position: Last position that the draft supports; later positions are clamped to it.
        first_key: Function that returns the first slot of a request whose keys the draft attends to.
    """
    running = [b for b, count in enumerate(level.counts) if count]
    requests = [rows[b].request for b in running]
    counts = tuple(level.counts[b] for b in running)
    slots_B = to_device([request.slot for request in requests], level.node_R.device)
    sequence_R, _ = spread(counts, slots_B.device)
    length_B = state.length_S[slots_B]
    length_R = length_B[sequence_R]
    table_BM = state.block_table_SM[slots_B]
    highest = [max(forest.trees[b].expanded[depth]) for b in running]
    return PackedBatch(
        tokens_T=state.tokens_SP[slots_B[sequence_R], length_R + level.node_R],
        positions_T=(length_R + depth).clamp(max=last_position),
        slots_T=slots_of(table_BM, sequence_R, length_R + level.node_R),
        prefix_len_B=length_B,
        ancestors_T=level.ancestors_R,
        block_table_BM=table_BM,
        blocks=tuple(tuple(request.blocks) for request in requests),
        query_counts=counts,
        key_bounds=tuple(r.cached_bound + node + 1 for r, node in zip(requests, highest, strict=True)),
        key_starts=tuple(first_key(request) for request in requests),
        dense=all(r.cached_bound == r.cached for r in requests) and all(node == depth for node in highest),
    )


def catch_up_runs(
    state: DeviceState, requests: Sequence[Request], counts: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Locate the ``counts[b]`` draft slots that end at the root of each request.

    Returns:
        The first draft slot of each request [B], all draft slots [T], and the slot in DeviceState of each [T].
    """
    slots_B = to_device([request.slot for request in requests], state.length_S.device)
    first_B = state.length_S[slots_B] + 1 - to_device(counts, slots_B.device)
    sequence_T, row_T = spread(tuple(counts), slots_B.device)
    return first_B, first_B[sequence_T] + row_T, slots_B[sequence_T]


def roots_of(out_TE: Tensor, counts: Sequence[int], drafting: Sequence[int], rows: int) -> Tensor:
    """Return the last hidden state of each row of a causal pass, [B, E]; zeros for rows not in ``drafting``."""
    last = to_device(counts, out_TE.device).cumsum(0) - 1
    if len(drafting) == rows:
        return out_TE[last]
    roots_BE = out_TE.new_zeros(rows, out_TE.shape[-1])
    roots_BE[to_device(drafting, out_TE.device)] = out_TE[last]
    return roots_BE
