"""What the device learns before a step, and what stays of it: accepted keys, tokens and states move to where they
belong, lengths advance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE
from specdecode_worker.engine.kv_cache.paged_cache import PagedCache
from specdecode_worker.engine.scheduler import Row
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.engine.step.packed_batch import slots_of
from specdecode_worker.engine.step.target_pass import Pass
from specdecode_worker.speculation.acceptance import Outcome


@dataclass(frozen=True, slots=True)
class Roots:
    """Where rows that chose stand: their slots and blocks, the index of their last committed token, and which packed
    token of the pass it was."""

    slots_C: Tensor
    block_table_CM: Tensor
    index_C: Tensor
    packed_rows_C: Tensor


def tell_rows(state: DeviceState, rows: Sequence[Row]) -> None:
    """Tokens and prefix of requests that begin, and blocks that were taken since."""
    for row in rows:
        request = row.request
        if row.begins:
            state.admit(request.slot, request.tokens, request.blocks[: request.prefix // BLOCK_SIZE])
        if request.blocks_known < len(request.blocks):
            state.set_blocks(request.slot, request.blocks)
            request.blocks_known = len(request.blocks)


def keep_chunks(state: DeviceState, rows: Sequence[Row], step: Pass, aux_TA: Tensor | None) -> None:
    """Prefill chunks: their keys are in place, their last aux states are kept for the draft."""
    for begin, row in zip(step.packed.query_start, rows, strict=False):
        if row.is_chunk:
            end = row.start + row.count
            state.length_S[row.request.slot] = end
            if aux_TA is not None:
                aux = aux_TA[begin : begin + row.count]
                state.keep_last_aux(row.request.slot, row.request.blocks, end, aux)


def keep_paths(
    state: DeviceState, cache: PagedCache, roots: Roots, outcome: Outcome, aux_TA: Tensor | None, *, in_place: bool
) -> None:
    """Rows that chose: the accepted path's keys and aux states, the emitted tokens, the new length. ``in_place``: all
    trees are chains, whose keys stand where they belong."""
    if not in_place:
        _move_keys(cache, roots.block_table_CM, roots.index_C, outcome.path_BD)
    if aux_TA is not None:
        state.keep_path_aux(roots.slots_C, roots.index_C, outcome.path_BD, aux_TA, roots.packed_rows_C)
    state.commit(roots.slots_C, roots.index_C, outcome.emitted_BD, outcome.count_B)


def _move_keys(cache: PagedCache, block_table_BM: Tensor, roots_C: Tensor, path_CD: Tensor) -> None:
    """Where nothing but first children was accepted no key moves."""
    row_CD = torch.arange(len(path_CD), device=path_CD.device)[:, None].expand_as(path_CD)
    target_CD = roots_C[:, None] + 1 + torch.arange(path_CD.shape[1], device=path_CD.device)
    source = slots_of(block_table_BM, row_CD, roots_C[:, None] + path_CD.clamp(min=0))
    target = slots_of(block_table_BM, row_CD, target_CD.expand_as(path_CD))
    # A pair that does nothing points into the padding block.
    moves = path_CD > 0
    source, target = torch.where(moves, source, 0), torch.where(moves, target, 0)
    cache.keep(source.flatten(), target.flatten(), group=path_CD.shape[1])
