"""Transfer of request state to the device before a step and commit of accepted keys, tokens and states after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_worker.engine.batch import Row, decoding_rows
from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE
from specdecode_worker.engine.kv_cache.paged_cache import PagedCache
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.engine.step.packed_batch import slots_of
from specdecode_worker.engine.step.target_pass import TargetPass
from specdecode_worker.speculation.acceptance import Outcome


@dataclass(frozen=True, slots=True)
class Roots:
    """Roots (last committed tokens) of the C rows that choose a token."""

    slots_C: Tensor
    """Slots in the device state."""
    block_table_CM: Tensor
    index_C: Tensor
    """Index of the root in its sequence."""
    packed_rows_C: Tensor
    """Index of the root among the packed tokens of the pass."""


def upload_rows(state: DeviceState, rows: Sequence[Row]) -> None:
    """Copy the tokens and prefixes of newly admitted requests and all newly taken blocks to the device state."""
    slots: list[int] = []
    columns: list[int] = []
    blocks: list[int] = []
    for row in rows[decoding_rows(rows) :]:
        if row.is_first_chunk:
            request = row.request
            state.admit(request.slot, request.tokens, request.blocks[: request.prefix // BLOCK_SIZE])
    for row in rows:
        request = row.request
        known, owned = request.blocks_known, len(request.blocks)
        if known < owned:
            slots += [request.slot] * (owned - known)
            columns += range(known, owned)
            blocks += request.blocks[known:]
            request.blocks_known = owned
    if blocks:
        state.set_blocks(slots, columns, blocks)


def commit_chunks(state: DeviceState, rows: Sequence[Row], step: TargetPass, aux_TA: Tensor | None) -> None:
    """Commit prefill chunks: advance their lengths and store their last auxiliary states for the draft.

    The keys of a chunk are already at their final slots.
    """
    for begin, row in zip(step.packed.query_start, rows, strict=False):
        if row.is_chunk:
            end = row.start + row.count
            state.set_length(row.request.slot, end)
            if aux_TA is not None:
                aux = aux_TA[begin : begin + row.count]
                state.store_last_aux(row.request.slot, row.request.blocks, end, aux)


def commit_paths(
    state: DeviceState, cache: PagedCache, roots: Roots, outcome: Outcome, aux_TA: Tensor | None, *, in_place: bool
) -> None:
    """Commit the rows that chose a token: accepted keys, auxiliary states, emitted tokens and new lengths.

    Args:
        state: Device state of the requests.
        cache: The target's cache.
        roots: Roots of the rows.
        outcome: Result of verification.
        aux_TA: Auxiliary states of all packed tokens; None if no draft reads any.
        in_place: All trees are chains, so that accepted keys are already at their final slots.
    """
    if not in_place:
        _move_keys(cache, roots.block_table_CM, roots.index_C, outcome.path_BD)
    if aux_TA is not None:
        state.store_path_aux(roots.slots_C, roots.index_C, outcome.path_BD, aux_TA, roots.packed_rows_C)
    state.commit(roots.slots_C, roots.index_C, outcome.emitted_BD, outcome.count_B)


def _move_keys(cache: PagedCache, block_table_BM: Tensor, roots_C: Tensor, path_CD: Tensor) -> None:
    """Move the keys and values of accepted nodes to the slots directly after the roots.

    Args:
        cache: The target's cache.
        block_table_BM: Block tables; the first rows are those of the roots.
        roots_C: Index of each root in its sequence.
        path_CD: Accepted nodes in path order, -1 as padding.
    """
    row_CD = torch.arange(len(path_CD), device=path_CD.device)[:, None].expand_as(path_CD)
    target_CD = roots_C[:, None] + 1 + torch.arange(path_CD.shape[1], device=path_CD.device)
    source = slots_of(block_table_BM, row_CD, roots_C[:, None] + path_CD.clamp(min=0))
    target = slots_of(block_table_BM, row_CD, target_CD.expand_as(path_CD))
    # Padding pairs copy slot 0 of the padding block onto itself.
    moves = path_CD > 0
    source, target = torch.where(moves, source, 0), torch.where(moves, target, 0)
    cache.keep(source.flatten(), target.flatten(), group=path_CD.shape[1])
