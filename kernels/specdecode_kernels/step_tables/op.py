"""Bookkeeping of a decode step, captured or not: one kernel per question on a GPU, else the reference."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.step_tables import reference
from specdecode_kernels.step_tables.tables import Committed, PackedRows, SamplingTables, SlotState, StepRows, Verified


def _path(x: Tensor) -> ModuleType:
    """Return the module that packs and drafts for this tensor."""
    if not dispatch.on_gpu(x):
        return reference
    from specdecode_kernels.step_tables import kernel

    return kernel


def _commit_path(x: Tensor) -> ModuleType:
    """Return the module that commits for this tensor."""
    if not dispatch.on_gpu(x):
        return reference
    from specdecode_kernels.step_tables import commit_kernel

    return commit_kernel


def begin(state: SlotState, slots_B1: Tensor, live_B1: Tensor) -> StepRows:
    """Return the rows of a step as `reference.begin` does."""
    rows: StepRows = _path(slots_B1).begin(state, slots_B1, live_B1)
    return rows


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
    packed: PackedRows = _path(sequence_T).pack(state, rows, sampling, sequence_T, offset_T, depth_T, last_position)
    return packed


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
    _path(ranked_RK).write_children(state, rows, ranked_RK, sequence_R, node_R, depth, trees, ranked_BNK)


def commit(
    state: SlotState,
    rows: StepRows,
    trees: Verified,
    ranked_BNK: Tensor | None,
    depth_limit_B: Tensor,
    depth: int,
) -> Committed:
    """Accept and commit as `reference.commit` does."""
    done: Committed = _commit_path(trees.chosen_T).commit(state, rows, trees, ranked_BNK, depth_limit_B, depth)
    return done


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
    _commit_path(out).store_states(rows, query_start, out, depth, aux_TA, ring_SRA, block_aux_NA, page)
