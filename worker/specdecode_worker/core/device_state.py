"""State of the running requests on the device, and copies of its results to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import MAX_NODES
from specdecode_worker.core.kv_cache import BLOCK_SIZE

# Asynchronous copies of results from the device to the host.


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Completion of a group of copies to the host."""

    event: torch.cuda.Event | None = None
    """CUDA event recorded after the copies; None if nothing has to be copied."""

    def wait(self) -> None:
        """Wait for these copies, but not for work that was queued after them."""
        if self.event is not None:
            self.event.synchronize()


def to_host(tensors: Sequence[Tensor], *, overwritten: bool = False) -> tuple[list[Tensor], HostCopy]:
    """Queue copies of device tensors to pinned host memory.

    Args:
        tensors: Tensors of one device. CPU tensors are returned as they are.
        overwritten: The tensors may be overwritten before the copies are read, so that CPU tensors are cloned.

    Returns:
        The copies, valid after ``HostCopy.wait``, and that ``HostCopy``.
    """
    if not tensors or not tensors[0].is_cuda:
        return [tensor.clone() if overwritten else tensor for tensor in tensors], HostCopy()
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return copies, HostCopy(event)


# Device state of running requests: one row ("slot") per request, read and written without the host.
#
# The tokens of a draft tree are stored after the committed ones, node j at index length + j, as are its keys. Accepted
# tokens and keys move to the front of that region; the next step overwrites the rest.

STATE_RING_POSITIONS = 64
"""Number of last positions of each request with stored hidden states. A draft that paused can catch up this far."""

AuxStates = tuple[Tensor | None, Tensor | None]
"""Storage of auxiliary states: the ring and the states of every block's last token; None if no draft reads any."""


class DeviceState:
    """Tensors of all slots; the last slot is for padding rows.

    Attributes:
        tokens_SP: Tokens by slot and position. The last column (``scratch``) absorbs padding.
        length_S: Number of keys of each slot in the target's cache. The root, the last committed token, is at this
            index of ``tokens_SP``.
        block_table_SM: Cache blocks of each slot. Those of the padding slot are the padding block.
        ring_SRA: Auxiliary hidden states of the target at position modulo the ring size; the last column
            absorbs padding. None if no draft reads such states.
        block_aux_NA: Auxiliary hidden state of the last token of every cache block, if kept.
    """

    def __init__(self, slots: int, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the state of ``slots`` requests of ``max_model_len`` tokens; auxiliary states use ``dtype``."""
        reach = max_model_len + MAX_NODES + 1
        self.scratch = reach
        self.padding_slot = slots
        self.tokens_SP = torch.zeros(slots + 1, reach + 1, dtype=torch.int64, device=device)
        self.length_S = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.block_table_SM = torch.zeros(slots + 1, -(-reach // BLOCK_SIZE), dtype=torch.int64, device=device)
        self._dtype = dtype
        self._blocks = 0
        self.ring_SRA: Tensor | None = None
        self.block_aux_NA: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the auxiliary states, which is that of the target."""
        return self._dtype

    def allocate_states(self, aux_size: int) -> None:
        """Allocate storage for auxiliary states of width ``aux_size`` (0: none); previous states are lost."""
        self.use_states(self.new_states(aux_size))

    def new_states(self, aux_size: int) -> AuxStates:
        """Allocate other storage for auxiliary states, for `use_states`. The present storage stays in use."""
        ring_shape = (len(self.length_S), STATE_RING_POSITIONS + 1, aux_size)
        return self._zeros(ring_shape), self._zeros((self._blocks, aux_size))

    def use_states(self, states: AuxStates) -> None:
        """Replace the storage of the auxiliary states; previous states are lost."""
        self.ring_SRA, self.block_aux_NA = states

    def _zeros(self, shape: tuple[int, ...]) -> Tensor | None:
        return torch.zeros(shape, dtype=self._dtype, device=self.length_S.device) if 0 not in shape else None

    def allocate_block_states(self, blocks: int) -> None:
        """Allocate storage for the auxiliary state of every block's last token (0 blocks: none).

        With it a draft can continue after any cached prefix.
        """
        self._blocks = blocks
        if self.ring_SRA is None or not blocks:
            self.block_aux_NA = None
        else:
            self.block_aux_NA = self.ring_SRA.new_zeros(blocks, self.ring_SRA.shape[-1])

    def admit(self, slot: int, tokens: list[int], prefix: Sequence[int] = ()) -> None:
        """Write the tokens of a request that starts in ``slot``; ``prefix`` are its blocks found in the cache."""
        length = len(prefix) * BLOCK_SIZE
        self.tokens_SP[slot, : len(tokens)] = to_device(tokens, self.tokens_SP.device)
        self.set_length(slot, length)
        if prefix and self.ring_SRA is not None and self.block_aux_NA is not None:
            self.ring_SRA[slot, (length - 1) % STATE_RING_POSITIONS] = self.block_aux_NA[prefix[-1]]

    def set_length(self, slot: int, length: int) -> None:
        """Write the number of keys of ``slot`` without waiting. An assignment would copy the number on torch 2.11."""
        self.length_S[slot].fill_(length)

    def set_blocks(self, slots: list[int], columns: list[int], blocks: list[int]) -> None:
        """Write entries of the block tables: block ``blocks[i]`` to column ``columns[i]`` of slot ``slots[i]``."""
        entries = to_device([slots, columns, blocks], self.block_table_SM.device)
        self.block_table_SM[entries[0], entries[1]] = entries[2]

    def store_last_aux(self, slot: int, blocks: Sequence[int], end: int, aux_TA: Tensor) -> None:
        """Store the auxiliary states of the consecutive positions that end at ``end`` (exclusive).

        The ring takes the last ones, and the block storage those that end one of the sequence's ``blocks``.
        """
        assert self.ring_SRA is not None, "no draft reads aux states"
        count = min(len(aux_TA), STATE_RING_POSITIONS)
        self.ring_SRA[slot, torch.arange(end - count, end, device=aux_TA.device) % STATE_RING_POSITIONS] = aux_TA[
            -count:
        ]
        if self.block_aux_NA is not None:
            start = end - len(aux_TA)
            whole = blocks[start // BLOCK_SIZE : end // BLOCK_SIZE]
            last_RA = aux_TA[BLOCK_SIZE - 1 - start % BLOCK_SIZE :: BLOCK_SIZE]
            self.block_aux_NA[to_device(whole, aux_TA.device, dtype=torch.int64)] = last_RA

    def aux(self, slots_T: Tensor, positions_T: Tensor) -> Tensor:
        """Return the stored auxiliary states [T, A]; valid for the last STATE_RING_POSITIONS positions of each slot."""
        assert self.ring_SRA is not None, "no draft reads aux states"
        return self.ring_SRA[slots_T, positions_T % STATE_RING_POSITIONS]
