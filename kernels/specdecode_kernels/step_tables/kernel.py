"""Packing and drafting of a decode step on a GPU, one launch per function (README.md). Suffixes as in tables.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.sample.reference import Truncation
from specdecode_kernels.step_tables.tables import PackedRows, SamplingTables, SlotState, StepRows

_COLUMNS = 1024
"""Columns that a copying program handles."""
_ROWS = 64
"""Packed rows that a program handles."""


@triton.jit(do_not_specialize=["slots_B1", "live_B1"])
def _begin_kernel(length_S, table_SM, slots_B1, live_B1, roots_B1, blocks_B1M, columns, BLOCK: tl.constexpr):
    """Copy a part of one row's block table; the first part also writes the root."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_B1 + row)
    if tl.program_id(1) == 0:
        tl.store(roots_B1 + row, tl.load(length_S + slot) * tl.load(live_B1 + row))
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    blocks = tl.load(table_SM + slot * columns + m, mask=m < columns, other=0)
    tl.store(blocks_B1M + row * columns + m, blocks, mask=m < columns)


@triton.jit(
    do_not_specialize=[
        "slots_B1",
        "sequence_T",
        "offset_T",
        "depth_T",
        "temperature_B1",
        "seed_B1",
        "top_k_B1",
        "top_p_B1",
        "min_p_B1",
        "top_p_T",
        "min_p_T",
        "rows",
    ]
)
def _pack_kernel(
    tokens_SP,
    slots_B1,
    roots_B1,
    blocks_B1M,
    sequence_T,
    offset_T,
    depth_T,
    temperature_B1,
    seed_B1,
    top_k_B1,
    top_p_B1,
    min_p_B1,
    ints_7T,
    temperature_T,
    top_p_T,
    min_p_T,
    rows,
    reach,
    columns,
    last_position,
    PAGE: tl.constexpr,
    DEPTHS: tl.constexpr,
    CUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK packed rows. ``ints_7T``: token, position, place, slot, index, next position, seed (and top-k)."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = t < rows
    sequence = tl.load(sequence_T + t, mask=real, other=0)
    root, slot = tl.load(roots_B1 + sequence, mask=real, other=0), tl.load(slots_B1 + sequence, mask=real, other=0)
    offset = tl.load(offset_T + t, mask=real, other=0)
    index = root + offset
    position = index
    if DEPTHS:
        position = root + tl.load(depth_T + t, mask=real, other=0)
    block = tl.load(blocks_B1M + sequence * columns + index // PAGE, mask=real, other=0)
    tl.store(ints_7T + t, tl.load(tokens_SP + slot * reach + index, mask=real, other=0), mask=real)
    tl.store(ints_7T + rows + t, tl.minimum(position, last_position), mask=real)
    tl.store(ints_7T + 2 * rows + t, block * PAGE + index % PAGE, mask=real)
    tl.store(ints_7T + 3 * rows + t, slot, mask=real)
    tl.store(ints_7T + 4 * rows + t, index, mask=real)
    tl.store(ints_7T + 5 * rows + t, position + 1, mask=real)
    tl.store(ints_7T + 6 * rows + t, tl.load(seed_B1 + sequence, mask=real, other=0), mask=real)
    tl.store(temperature_T + t, tl.load(temperature_B1 + sequence, mask=real, other=0.0), mask=real)
    if CUTS:
        tl.store(ints_7T + 7 * rows + t, tl.load(top_k_B1 + sequence, mask=real, other=0), mask=real)
        tl.store(top_p_T + t, tl.load(top_p_B1 + sequence, mask=real, other=1.0), mask=real)
        tl.store(min_p_T + t, tl.load(min_p_B1 + sequence, mask=real, other=0.0), mask=real)


@triton.jit(do_not_specialize=["slots_B1", "sequence_R", "node_R", "parent_BN", "rank_BN", "batch"])
def _write_children_kernel(
    tokens_SP,
    slots_B1,
    roots_B1,
    ranked_RK,
    sequence_R,
    node_R,
    parent_BN,
    rank_BN,
    ranked_BNK,
    batch,
    nodes,
    reach,
    K: tl.constexpr,
    MOST_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the proposals behind one node, and the tokens of its children."""
    row = tl.program_id(0).to(tl.int64)
    sequence, node = tl.load(sequence_R + row), tl.load(node_R + row)
    if sequence >= batch:
        return
    k = tl.arange(0, BLOCK_K)
    ranked_K = tl.load(ranked_RK + row * K + k, mask=k < K, other=-1)
    tl.store(ranked_BNK + (sequence * nodes + node) * MOST_K + k, ranked_K, mask=k < K)
    n = tl.arange(0, BLOCK_N)
    tree = sequence * nodes + n
    child = tl.load(parent_BN + tree, mask=n < nodes, other=-1) == node
    rank = tl.load(rank_BN + tree, mask=child, other=0)
    token = tl.maximum(tl.load(ranked_RK + row * K + rank, mask=child & (rank < K), other=0), 0)
    root = tl.load(roots_B1 + sequence)
    tl.store(tokens_SP + tl.load(slots_B1 + sequence) * reach + root + n, token, mask=child)


def begin(state: SlotState, slots_B1: Tensor, live_B1: Tensor) -> StepRows:
    """Return the rows of a step as `reference.begin` does."""
    columns = state.block_table_SM.shape[1]
    roots_B1, blocks_B1M = torch.empty_like(slots_B1), slots_B1.new_empty(len(slots_B1), columns)
    _begin_kernel[(len(slots_B1), triton.cdiv(columns, _COLUMNS))](
        state.length_S, state.block_table_SM, slots_B1, live_B1, roots_B1, blocks_B1M, columns, BLOCK=_COLUMNS
    )
    return StepRows(slots_B1, roots_B1, blocks_B1M)


def pack(
    state: SlotState,
    rows: StepRows,
    sampling: SamplingTables,
    sequence_T: Tensor,
    offset_T: Tensor,
    depth_T: Tensor | None,
    last_position: int,
) -> PackedRows:
    """Return packed rows as `reference.pack` does."""
    count, cuts = len(sequence_T), sampling.truncation
    assert sequence_T.is_contiguous(), "rows lie behind each other"
    assert offset_T.is_contiguous(), "rows lie behind each other"
    assert depth_T is None or depth_T.is_contiguous(), "rows lie behind each other"
    ints = torch.empty(8, count, dtype=torch.int64, device=sequence_T.device)
    floats = torch.empty(3, count, dtype=torch.float32, device=sequence_T.device)
    top_k_B1, top_p_B1, min_p_B1 = cuts or (sampling.seed_B1, sampling.temperature_B1, sampling.temperature_B1)
    _pack_kernel[(triton.cdiv(count, _ROWS),)](
        state.tokens_SP,
        rows.slots_B1,
        rows.roots_B1,
        rows.blocks_B1M,
        sequence_T,
        offset_T,
        offset_T if depth_T is None else depth_T,
        sampling.temperature_B1,
        sampling.seed_B1,
        top_k_B1,
        top_p_B1,
        min_p_B1,
        ints,
        floats[0],
        floats[1],
        floats[2],
        count,
        state.tokens_SP.shape[1],
        rows.blocks_B1M.shape[1],
        last_position,
        PAGE=state.page,
        DEPTHS=depth_T is not None,
        CUTS=cuts is not None,
        BLOCK=_ROWS,
        num_warps=2,
    )
    token, position, place, slot, index, following, seed, top_k = ints.unbind(0)
    truncation = None if cuts is None else Truncation(top_k, floats[1], floats[2])
    return PackedRows(token, position, place, slot, index, following, floats[0], seed, truncation)


def write_children(
    state: SlotState,
    rows: StepRows,
    ranked_RK: Tensor,
    sequence_R: Tensor,
    node_R: Tensor,
    depth: int,
    trees: tuple[Tensor, Tensor, Tensor],
    ranked_BNK: Tensor,
) -> None:
    """Write proposals and the tokens of children as `reference.write_children` does."""
    batch, nodes, most = ranked_BNK.shape
    assert all(x.is_contiguous() for x in (sequence_R, node_R, ranked_RK)), "rows lie behind each other"
    _write_children_kernel[(len(ranked_RK),)](
        state.tokens_SP,
        rows.slots_B1,
        rows.roots_B1,
        ranked_RK,
        sequence_R,
        node_R,
        *trees[:2],
        ranked_BNK,
        batch,
        nodes,
        state.tokens_SP.shape[1],
        K=ranked_RK.shape[1],
        MOST_K=most,
        BLOCK_N=triton.next_power_of_2(nodes),
        BLOCK_K=triton.next_power_of_2(ranked_RK.shape[1]),
        num_warps=1,
    )
