"""What the device knows of each running request: one row ("slot") a request, read and written without the host.

The tokens of a tree stand behind the committed ones, node j at index length + j, just as its keys do; what is
accepted moves to the front, the rest is overwritten by the next step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdecode_worker.contract import MAX_NODES
from specdecode_worker.engine.blocks import BLOCK_SIZE

RING = 64
"""Positions whose hidden states are kept per request: as far back as a draft that did not run can catch up."""


class DeviceState:
    """``length_S`` keys stand in the target's cache; the root, the last committed token, is at that index of
    ``tokens_SP``. ``ring_SRA`` holds the target's aux states at position mod RING; column RING absorbs padding, as
    does the last column of ``tokens_SP``."""

    def __init__(self, slots: int, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        reach = max_model_len + MAX_NODES + 1
        self.scratch = reach
        self.tokens_SP = torch.zeros(slots, reach + 1, dtype=torch.int64, device=device)
        self.length_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self.block_table_SM = torch.zeros(slots, -(-reach // BLOCK_SIZE), dtype=torch.int64, device=device)
        self._dtype = dtype
        self.ring_SRA: Tensor | None = None

    def keep_states(self, aux_size: int) -> None:
        """Keeps aux states of this width from now on; what was kept is lost. 0 keeps none."""
        shape = (len(self.length_S), RING + 1, aux_size)
        self.ring_SRA = torch.zeros(shape, dtype=self._dtype, device=self.length_S.device) if aux_size else None

    def admit(self, slot: int, tokens: list[int]) -> None:
        self.tokens_SP[slot, : len(tokens)] = torch.tensor(tokens, device=self.tokens_SP.device)
        self.length_S[slot] = 0

    def set_blocks(self, slot: int, blocks: list[int]) -> None:
        self.block_table_SM[slot, : len(blocks)] = torch.tensor(blocks, device=self.block_table_SM.device)

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
        self.ring_SRA[slots_C[:, None], column_CD] = aux_TA[root_rows_C[:, None] + nodes_CD.clamp(min=0)]

    def keep_last_aux(self, slot: int, end: int, aux_TA: Tensor) -> None:
        """Keeps the aux states of consecutive positions up to ``end``, as many as the ring holds."""
        assert self.ring_SRA is not None, "no draft reads aux states"
        count = min(len(aux_TA), RING)
        self.ring_SRA[slot, torch.arange(end - count, end, device=aux_TA.device) % RING] = aux_TA[-count:]

    def aux(self, slots_T: Tensor, positions_T: Tensor) -> Tensor:
        """[T, A] kept aux states; valid for the last RING positions."""
        assert self.ring_SRA is not None, "no draft reads aux states"
        return self.ring_SRA[slots_T, positions_T % RING]
