"""What the device knows of each running request: one row ("slot") a request, read and written without the host.

The tokens of a tree stand behind the committed ones, node j at index length + j, just as its keys do; what is
accepted moves to the front, the rest is overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_NODES
from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE, PADDING_BLOCK

RING = 64
"""Positions whose hidden states are kept per request: as far back as a draft that did not run can catch up."""


class DeviceState:
    """``length_S`` keys stand in the target's cache; the root, the last committed token, is at that index of
    ``tokens_SP``. ``ring_SRA`` holds the target's aux states at position mod RING; column RING absorbs padding, as
    does the last column of ``tokens_SP``. ``block_aux_NA``, where kept, holds them by block: of its last token. Slot
    ``nobody`` is for padding rows: its blocks are the padding block, its length means nothing."""

    def __init__(self, slots: int, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        reach = max_model_len + MAX_NODES + 1
        self.scratch = reach
        self.nobody = slots
        self.tokens_SP = torch.zeros(slots + 1, reach + 1, dtype=torch.int64, device=device)
        self.length_S = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.block_table_SM = torch.zeros(slots + 1, -(-reach // BLOCK_SIZE), dtype=torch.int64, device=device)
        self._dtype = dtype
        self._blocks = 0
        self.ring_SRA: Tensor | None = None
        self.block_aux_NA: Tensor | None = None

    def keep_states(self, aux_size: int) -> None:
        """Keeps aux states of this width from now on; what was kept is lost. 0 keeps none."""
        shape = (len(self.length_S), RING + 1, aux_size)
        self.ring_SRA = torch.zeros(shape, dtype=self._dtype, device=self.length_S.device) if aux_size else None
        self.keep_block_states(self._blocks)

    def keep_block_states(self, blocks: int) -> None:
        """Keeps the aux state of every block's last token too, so that a draft can go on behind any of them."""
        self._blocks = blocks
        if self.ring_SRA is None or not blocks:
            self.block_aux_NA = None
        else:
            self.block_aux_NA = self.ring_SRA.new_zeros(blocks, self.ring_SRA.shape[-1])

    def admit(self, slot: int, tokens: list[int], prefix: Sequence[int] = ()) -> None:
        """``prefix`` are blocks that hold the keys of the first tokens already."""
        length = len(prefix) * BLOCK_SIZE
        self.tokens_SP[slot, : len(tokens)] = to_device(tokens, self.tokens_SP.device)
        self.length_S[slot] = length
        if prefix and self.ring_SRA is not None and self.block_aux_NA is not None:
            self.ring_SRA[slot, (length - 1) % RING] = self.block_aux_NA[prefix[-1]]

    def set_blocks(self, slot: int, blocks: list[int]) -> None:
        self.block_table_SM[slot, : len(blocks)] = to_device(blocks, self.block_table_SM.device)

    def commit(self, slots_C: Tensor, roots_C: Tensor, emitted_CD: Tensor, count_C: Tensor) -> None:
        """Puts emitted tokens behind their roots and advances the lengths."""
        step_D = torch.arange(emitted_CD.shape[1], device=slots_C.device)
        index_CD = torch.where(emitted_CD >= 0, roots_C[:, None] + 1 + step_D, self.scratch)
        self.tokens_SP[slots_C[:, None], index_CD] = emitted_CD
        self.length_S[slots_C] = roots_C + 1 + count_C

    def keep_path_aux(
        self, slots_C: Tensor, roots_C: Tensor, path_CD: Tensor, aux_TA: Tensor, root_rows_C: Tensor
    ) -> None:
        """Keeps the aux states of each root and of the nodes accepted behind it."""
        assert self.ring_SRA is not None, "no draft reads aux states"
        nodes_CD = torch.cat((torch.zeros_like(roots_C)[:, None], path_CD), dim=1)
        step_D = torch.arange(nodes_CD.shape[1], device=slots_C.device)
        column_CD = torch.where(nodes_CD >= 0, (roots_C[:, None] + step_D) % RING, RING)
        aux_CDA = aux_TA[root_rows_C[:, None] + nodes_CD.clamp(min=0)]
        self.ring_SRA[slots_C[:, None], column_CD] = aux_CDA
        if self.block_aux_NA is not None:
            position_CD = roots_C[:, None] + step_D
            ends_block_CD = (nodes_CD >= 0) & (position_CD % BLOCK_SIZE == BLOCK_SIZE - 1)
            block_CD = self.block_table_SM[slots_C[:, None], position_CD // BLOCK_SIZE]
            self.block_aux_NA[torch.where(ends_block_CD, block_CD, PADDING_BLOCK)] = aux_CDA

    def keep_last_aux(self, slot: int, blocks: Sequence[int], end: int, aux_TA: Tensor) -> None:
        """Keeps the aux states of consecutive positions up to ``end``: as many as the ring holds, and those of the
        last tokens of ``blocks``, the sequence's own."""
        assert self.ring_SRA is not None, "no draft reads aux states"
        count = min(len(aux_TA), RING)
        self.ring_SRA[slot, torch.arange(end - count, end, device=aux_TA.device) % RING] = aux_TA[-count:]
        if self.block_aux_NA is not None:
            start = end - len(aux_TA)
            whole = blocks[start // BLOCK_SIZE : end // BLOCK_SIZE]
            last_rows = aux_TA[BLOCK_SIZE - 1 - start % BLOCK_SIZE :: BLOCK_SIZE]
            self.block_aux_NA[to_device(whole, aux_TA.device, dtype=torch.int64)] = last_rows

    def aux(self, slots_T: Tensor, positions_T: Tensor) -> Tensor:
        """[T, A] kept aux states; valid for the last RING positions."""
        assert self.ring_SRA is not None, "no draft reads aux states"
        return self.ring_SRA[slots_T, positions_T % RING]
