"""Acceptance and commit of a decode step on a GPU, one launch per function (README.md). Suffixes as in tables.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.step_tables.tables import Committed, SlotState, StepRows, Verified

_COLUMNS = 1024
"""Columns that a copying program handles."""


@triton.jit
def _place(blocks_M, index, PAGE: tl.constexpr):
    """Return the cache slot of an index of a sequence."""
    return tl.load(blocks_M + index // PAGE) * PAGE + index % PAGE


@triton.jit(do_not_specialize=["slots_B1", "query_start", "parents_BN", "tokens_T", "chosen_T", "depth_limit_B", "D"])
def _commit_kernel(
    tokens_SP,
    length_S,
    slots_B1,
    roots_B1,
    blocks_B1M,
    query_start,
    parents_BN,
    tokens_T,
    chosen_T,
    ranked_BNK,
    depth_limit_B,
    out,
    source_BD,
    target_BD,
    nodes,
    reach,
    columns,
    D,
    RANKED: tl.constexpr,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Walk one tree along the chosen tokens, and write what follows from it."""
    row = tl.program_id(0).to(tl.int64)
    n, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    start = tl.load(query_start + row)
    mine = n < tl.load(query_start + row + 1) - start
    parent_N = tl.load(parents_BN + row * nodes + n, mask=n < nodes, other=-1)
    token_N = tl.load(tokens_T + start + n, mask=mine, other=-2)
    chosen_N = tl.load(chosen_T + start + n, mask=mine, other=-1)
    limit, root, slot = tl.load(depth_limit_B + row), tl.load(roots_B1 + row), tl.load(slots_B1 + row)
    blocks_M, result = blocks_B1M + row * columns, out + row * (3 * D + 3)
    at = tl.min(n, 0)
    count = tl.min(n, 0)
    for step in range(D + 1):
        here = tl.min(n, 0) + step
        alive = here <= count
        wanted = tl.sum(tl.where(n == at, chosen_N, 0), 0)
        emitted = tl.where(alive, wanted, -1)
        tl.store(result + step, emitted)
        tl.store(tokens_SP + slot * reach + root + 1 + step, emitted, mask=emitted >= 0)
        if RANKED:
            ranked_K = tl.load(ranked_BNK + (row * nodes + at) * K + k, mask=k < K, other=-1)
            rank = tl.min(tl.where((ranked_K == emitted) & (k < K), k, K), 0)
            ranked = tl.sum(tl.where(k == 0, ranked_K, 0), 0) >= 0
            # The token after a cut counts as a miss.
            rank = tl.where(count == limit, K, rank)
            tl.store(result + 2 * D + 1 + step, tl.where(alive & ranked, rank, -1).to(tl.int64))
        else:
            tl.store(result + 2 * D + 1 + step, emitted * 0 - 1)
        hit_N = mine & (parent_N == at) & (token_N == wanted)
        child = tl.min(tl.where(hit_N, n, BLOCK_N), 0)
        goes = alive & (child < BLOCK_N) & (count < limit) & (here < D)
        if step < D:
            tl.store(result + D + 1 + step, tl.where(goes, child, -1).to(tl.int64))
            source = _place(blocks_M, root + tl.where(goes, child, 0), PAGE)
            target = _place(blocks_M, root + tl.where(goes, 1 + here, 0), PAGE)
            tl.store(source_BD + row * D + step, tl.where(goes, source, 0))
            tl.store(target_BD + row * D + step, tl.where(goes, target, 0))
        at = tl.where(goes, child, at)
        count += tl.where(goes, 1, 0)
    tl.store(result + 3 * D + 2, count.to(tl.int64))
    tl.store(length_S + slot, root + 1 + count)


@triton.jit(do_not_specialize=["slots_B1", "query_start", "depth"])
def _store_states_kernel(
    slots_B1,
    roots_B1,
    blocks_B1M,
    query_start,
    out,
    aux_TA,
    ring_SRA,
    block_aux_NA,
    width,
    ring,
    columns,
    depth,
    BLOCKS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a part of the state of one node of an accepted path."""
    row, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(query_start + row)
    node = tl.load(out + row * (3 * depth + 3) + depth + step, mask=step > 0, other=0)
    if (node < 0) | (tl.load(query_start + row + 1) == start):
        return
    a = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    state = tl.load(aux_TA + (start + node) * width + a, mask=a < width)
    position = tl.load(roots_B1 + row) + step
    column = tl.load(slots_B1 + row) * (ring + 1) + position % ring
    tl.store(ring_SRA + column * width + a, state, mask=a < width)
    if BLOCKS:
        block = tl.load(blocks_B1M + row * columns + position // PAGE)
        ends = position % PAGE + tl.zeros([BLOCK], tl.int64) == PAGE - 1
        tl.store(block_aux_NA + block * width + a, state, mask=(a < width) & ends)


def commit(
    state: SlotState,
    rows: StepRows,
    trees: Verified,
    ranked_BNK: Tensor | None,
    depth_limit_B: Tensor,
    depth: int,
) -> Committed:
    """Accept and commit as `reference.commit` does."""
    batch, nodes = trees.parents_BN.shape
    out = trees.chosen_T.new_empty(batch, 3 * depth + 3)
    source_BD, target_BD = (trees.chosen_T.new_empty(batch, depth) for _ in range(2))
    ranks = 1 if ranked_BNK is None else ranked_BNK.shape[2]
    _commit_kernel[(batch,)](
        state.tokens_SP,
        state.length_S,
        rows.slots_B1,
        rows.roots_B1,
        rows.blocks_B1M,
        trees.query_start,
        trees.parents_BN,
        trees.tokens_T,
        trees.chosen_T,
        trees.parents_BN if ranked_BNK is None else ranked_BNK,
        depth_limit_B,
        out,
        source_BD,
        target_BD,
        nodes,
        state.tokens_SP.shape[1],
        rows.blocks_B1M.shape[1],
        depth,
        RANKED=ranked_BNK is not None,
        PAGE=state.page,
        K=ranks,
        BLOCK_N=triton.next_power_of_2(nodes),
        BLOCK_K=triton.next_power_of_2(ranks),
        num_warps=1,
    )
    return Committed(out, source_BD, target_BD)


def store_states(
    rows: StepRows,
    query_start: Tensor,
    out: Tensor,
    depth: int,
    aux_TA: Tensor,
    ring_SRA: Tensor,
    block_aux_NA: Tensor | None,
    page: int,
) -> None:
    """Store auxiliary states as `reference.store_states` does."""
    width = aux_TA.shape[1]
    assert aux_TA.is_contiguous(), "states lie behind each other"
    _store_states_kernel[(len(out), depth + 1, triton.cdiv(width, _COLUMNS))](
        rows.slots_B1,
        rows.roots_B1,
        rows.blocks_B1M,
        query_start,
        out,
        aux_TA,
        ring_SRA,
        ring_SRA if block_aux_NA is None else block_aux_NA,
        width,
        ring_SRA.shape[1] - 1,
        rows.blocks_B1M.shape[1],
        depth,
        BLOCKS=block_aux_NA is not None,
        PAGE=page,
        BLOCK=_COLUMNS,
    )
