"""Passes of the target over the rows of a step, and commits of prompt chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.core.batch import Row, decoding_rows
from specdecode_worker.core.device_state import DeviceState
from specdecode_worker.core.kv_cache import BLOCK_SIZE
from specdecode_worker.core.paged_attention import PackedBatch, PackedTensors, PagedCache, slots_of, spread
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.target_states import TargetStates

# Forward pass of the target over a batch of rows: packing, forward, and logits where a token is chosen.


@dataclass(frozen=True, slots=True)
class TargetPass:
    """Packed batch on the device, with R rows of logits."""

    packed: PackedBatch
    logit_rows_R: Tensor
    """Index of the packed token behind each row of logits."""
    batch_R: Tensor
    """Row of the batch that each row of logits belongs to."""
    node_R: Tensor
    """Tree node of each row of logits."""
    depth_R: Tensor
    """Depth of that node."""


class Target:
    """Target network with its paged cache."""

    def __init__(self, model: CausalLM, cache: PagedCache, state: DeviceState) -> None:
        self.cache = cache
        self._model, self._state = model, state
        self._last_position = model.config.max_position_embeddings - 1

    def close(self) -> None:
        """Release resources outside of the device; there are none unless a subclass adds other ranks."""

    @property
    def last_position(self) -> int:
        """Last position that the rotary embedding supports."""
        return self._last_position

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        return self._model.config.vocab_size

    @property
    def form(self) -> str:
        """Format of the target's matrices; empty for that of activations."""
        return self._model.form

    def within_chunk(self, depth_limit_B: Tensor, roots_B: Tensor) -> Tensor:
        """Return the accepted depths of trees [B], cut where a chunk of attention ends.

        Nodes behind the end of the root's chunk saw keys that they must not see. A cut emits fewer tokens, never
        others.
        """
        chunk = self._model.config.attention_chunk_size
        return torch.minimum(depth_limit_B, chunk - 1 - roots_B % chunk) if chunk else depth_limit_B

    @property
    def layers(self) -> int:
        """Number of layers of the target."""
        return self._model.config.num_hidden_layers

    def forward(self, step: TargetPass, reads: TargetStates) -> tuple[Tensor, Tensor | None, Tensor]:
        """Run the target over a packed batch.

        Args:
            step: Batch from ``pack``.
            reads: Hidden states that the drafts read.

        Returns:
            Logits [R, V], the states that drafts read [T, A] (None if they read none), and the last hidden states
            [T, E].
        """
        return self.run(self._model, self.cache, step.packed, step.logit_rows_R, reads)

    def forward_tables(
        self, tables: PackedTensors, slots_B: Tensor, reads: TargetStates
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits [T, V] and the drafts' states [T, A] of every token without synchronizing with the host.

        CUDA graph capture relies on this. ``slots_B`` are the slots of the sequences in the device state, by which the
        other ranks of a replica know their blocks.
        """
        logits_TV, aux_TA, _ = self.run(self._model, self.cache, tables, tables.tokens_T, reads)
        return logits_TV, aux_TA

    def keep_tables(self, source_BD: Tensor, target_BD: Tensor) -> None:
        """Move the keys and values of accepted nodes, at most D of each sequence, in a captured step."""
        self.cache.keep(source_BD.flatten(), target_BD.flatten(), group=source_BD.shape[1])

    @staticmethod
    def run(
        model: CausalLM,
        cache: PagedCache,
        packed: PackedBatch | PackedTensors,
        logit_rows_R: Tensor,
        reads: TargetStates,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Run one pass of ``model`` over ``cache``; returns as ``forward``.

        Static so that the other ranks of a replica can run it with their shard of the model and the cache.
        """
        out = model(packed.tokens_T, packed.positions_T, cache.attend(packed), reads)
        hidden = out.hidden_TE
        if len(logit_rows_R) != len(hidden):
            hidden = hidden[logit_rows_R]
        return model.logits(hidden) if len(hidden) else hidden, out.aux_TA, out.hidden_TE

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Return the logits [T, V] of last hidden states [T, E]."""
        logits_TV: Tensor = self._model.logits(hidden_TE)
        return logits_TV

    def pack(self, rows: Sequence[Row]) -> TargetPass:
        """Pack the rows of a batch into one pass.

        All tokens are read from the device state by slot and index: those of a chunk at their positions in the prompt,
        those of a tree at the indices from the root on.
        """
        state, device = self._state, self._state.length_S.device
        counts = tuple(row.count for row in rows)
        slots_B = to_device([row.request.slot for row in rows], device)
        sequence_T, row_T = spread(counts, device)
        length_B = state.length_S[slots_B]
        index_T = length_B[sequence_T] + row_T
        depth_T, ancestors_T = _topology(rows, device)
        table_BM = state.block_table_SM[slots_B]
        packed = PackedBatch(
            tokens_T=state.tokens_SP[slots_B[sequence_T], index_T],
            positions_T=(length_B[sequence_T] + depth_T).clamp(max=self._last_position),
            slots_T=slots_of(table_BM, sequence_T, index_T),
            prefix_len_B=length_B,
            ancestors_T=ancestors_T,
            block_table_BM=table_BM,
            blocks=tuple(tuple(row.request.blocks) for row in rows),
            query_counts=counts,
            key_bounds=tuple(row.request.cached_bound + row.count for row in rows),
            key_starts=(0,) * len(rows),
            dense=all(row.count == 1 and not row.request.in_flight for row in rows),
            chunk_keys=tuple(row.start + row.count if row.is_chunk else 0 for row in rows),
        )
        logit_rows, batch, node, depth = _logit_rows(rows, device)
        return TargetPass(packed, logit_rows, batch, node, depth)


def _topology(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each packed token's position relative to its sequence's length [T] and its ancestor mask [T].

    The tokens of a chunk are consecutive, with the mask 0 for causal attention.
    """
    depths: list[int] = []
    ancestors: list[int] = []
    for row in rows:
        if row.is_chunk:
            depths += range(row.count)
            ancestors += [0] * row.count
        else:
            depths += row.tree.depths[: row.count]
            ancestors += row.tree.ancestors[: row.count]
    depth_T, ancestors_T = to_device([depths, ancestors], device)
    return depth_T, ancestors_T


def _logit_rows(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``logit_rows_R``, ``batch_R``, ``node_R`` and ``depth_R`` of ``TargetPass``."""
    logit_rows: list[tuple[int, int, int, int]] = []
    begin = 0
    for b, row in enumerate(rows):
        if row.is_chunk and row.emits:
            logit_rows.append((begin + row.count - 1, b, 0, 0))
        elif row.emits:
            logit_rows += [(begin + node, b, node, row.tree.depths[node]) for node in range(row.count)]
        begin += row.count
    columns = to_device(logit_rows, device, dtype=torch.int64).reshape(-1, 4).unbind(1)
    return columns[0], columns[1], columns[2], columns[3]


# Transfer of request state to the device before a step, and commit of prompt chunks after it.


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
