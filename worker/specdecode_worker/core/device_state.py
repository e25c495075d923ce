"""State of the running requests on the device: tokens, block tables, paged caches, and the batches of a pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from specdecode_kernels import dispatch
from specdecode_kernels.cpu.ops import Pages, attends
from specdecode_kernels.cpu.ops import attend as attend_natively
from specdecode_kernels.kv_keep.op import kv_keep
from specdecode_kernels.rope_cache.op import rope_cache
from specdecode_kernels.rope_cache.reference import FP8, UNSCALED, Scales, write
from specdecode_kernels.transfer import to_device
from specdecode_kernels.tree_attention.op import Prepared, attend, prepare, prepare_tables
from specdecode_worker.contract import MAX_NODES
from specdecode_worker.core.kv_cache import BLOCK_SIZE
from specdecode_worker.models.causal_lm import Attend, RotatingAttend
from specdecode_worker.models.config import PassRotations

T = TypeVar("T")

# Asynchronous copies of results from the device to the host.


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Completion of a group of copies to the host, or of other work of a device."""

    event: torch.cuda.Event | None = None
    """CUDA event recorded behind the work; None if there is nothing to wait for."""

    @classmethod
    def after_queued(cls, device: torch.device) -> HostCopy:
        """Return the completion of all work that is queued on ``device`` now. On a CPU none is."""
        if device.type != "cuda":
            return cls()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return cls(event)

    def wait(self) -> None:
        """Wait for these copies, or this work, but not for what was queued later."""
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
    return copies, HostCopy.after_queued(tensors[0].device)


# Device state of running requests: one row ("slot") per request, read and written without the host.
#
# The tokens of a draft tree are stored after the committed ones, node j at index length + j, as are its keys. Accepted
# tokens and keys move to the front of that region; the next step overwrites the rest.

SPARE_POSITIONS = 2 * (MAX_NODES + 1)
"""Positions of a slot behind its longest text: what the step in flight may commit there, and the tree behind that."""
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
        reach = max_model_len + SPARE_POSITIONS
        self.scratch = reach
        self.padding_slot = slots
        self.tokens_SP = torch.zeros(slots + 1, reach + 1, dtype=torch.int64, device=device)
        self.length_S = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.block_table_SM = torch.zeros(slots + 1, -(-reach // BLOCK_SIZE), dtype=torch.int64, device=device)
        self.dtype = dtype
        """Data type of the auxiliary states, which is that of the target."""
        self._blocks = 0
        self.ring_SRA: Tensor | None = None
        self.block_aux_NA: Tensor | None = None

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
        return torch.zeros(shape, dtype=self.dtype, device=self.length_S.device) if 0 not in shape else None

    def allocate_block_states(self, blocks: int) -> None:
        """Allocate storage for the auxiliary state of every block's last token, now and in `new_states`.

        With it a draft can continue after any cached prefix.
        """
        self._blocks = blocks
        if self.ring_SRA is not None:
            self.block_aux_NA = self._zeros((blocks, self.ring_SRA.shape[-1]))

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


# Packed batches of tokens, and attention over the paged KV cache.

# Inputs of one pass over packed tokens: prefill chunks, single tokens, chains and trees mixed in one batch.
#
# Slots, positions and lengths are computed on the device from the per-slot state, because the host's copy of a length
# can be one step behind. The number of queries of each sequence is known on the host. Target and draft passes use the
# same inputs.


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """T packed tokens of B sequences, with host-side counts and bounds."""

    tokens_T: Tensor
    positions_T: Tensor
    """Position of each token for the rotary embedding."""
    slots_T: Tensor
    """Cache slot that each token's key and value are written to."""
    prefix_len_B: Tensor
    """Number of cached keys of each sequence before this pass."""
    ancestors_T: Tensor
    """Bit mask per token of the tokens after the prefix that it attends to; 0 means causal."""
    block_table_BM: Tensor
    blocks: tuple[tuple[int, ...], ...]
    """Cache blocks of each sequence, as the host knows them."""
    query_counts: tuple[int, ...]
    """Number of packed tokens of each sequence."""
    key_bounds: tuple[int, ...]
    """Upper bound of each sequence's keys, those of this pass included."""
    key_starts: tuple[int, ...]
    """Number of oldest keys of each sequence that are hidden, for draft caches that begin after position 0."""
    dense: bool
    """True if the bounds are exact and every query sees every key."""
    chunk_keys: tuple[int, ...] = ()
    """Exact number of keys of each sequence that is a prompt chunk, those of this pass included; 0 for the others."""

    @property
    def query_start(self) -> tuple[int, ...]:
        """Index of each sequence's first packed token, then T: B + 1 values."""
        return tuple(accumulate(self.query_counts, initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensors:
    """Packed tokens described by device tensors only, for captured passes; fields as in ``PackedBatch``.

    ``query_start`` [B + 1] holds the first packed token of each sequence; tokens from its last value on are padding.
    Since no field is a host value, a captured pass stays valid when the contents of the tensors change.
    """

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    query_start: Tensor
    prefix_len_B: Tensor
    key_start_B: Tensor
    ancestors_T: Tensor
    block_table_BM: Tensor


def spread(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the sequence [T] and the index within that sequence [T] of packed tokens, given counts per sequence."""
    if len(counts) == 1:
        return torch.zeros(counts[0], dtype=torch.int64, device=device), torch.arange(counts[0], device=device)
    sequence = [b for b, count in enumerate(counts) for _ in range(count)]
    row = [i for count in counts for i in range(count)]
    sequence_T, row_T = to_device([sequence, row], device)
    return sequence_T, row_T


def slots_of(block_table_BM: Tensor, sequence_T: Tensor, index_T: Tensor) -> Tensor:
    """Return the cache slots [T] of key indices ``index_T`` of the sequences ``sequence_T``."""
    block_T = block_table_BM[sequence_T, index_T // BLOCK_SIZE]
    return block_T * BLOCK_SIZE + index_T % BLOCK_SIZE


# Paged cache of keys and values, and the attention that models run on it.


class PagedCache:
    """Paged keys and values of one network: ``[layer, 2, block, 16, kv_head, head_dim]``.

    The cache starts with zeros because masked keys, too, must be finite. The queries of a sequence in a pass must all
    be in one chunk where layers are chunked.
    """

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        chunk: int = 0,
        chunked: Collection[int] = (),
        scales: Sequence[Scales] = (),
    ) -> None:
        """Allocate the cache.

        Args:
            layers: Number of layers.
            blocks: Number of blocks, including the padding block.
            heads: Number of query heads.
            kv_heads: Number of key-value heads.
            head_dim: Head dimension.
            dtype: Type of keys and values.
            device: Device of the cache.
            chunk: Positions of a chunk of the chunked layers, if there are any.
            chunked: The chunked layers.
            scales: Scales of each layer, if keys and values are stored in fp8.
        """
        stored = FP8 if scales else dtype
        self.data = torch.zeros(layers, 2, blocks, BLOCK_SIZE, kv_heads, head_dim, dtype=stored, device=device)
        self.bits = self.data.view(torch.uint8) if scales else self.data
        """The cache as it is copied: fp8 as bytes, which every library can move."""
        self._scales, self._dtype = tuple(scales) or (UNSCALED,) * layers, dtype
        self._groups = heads // kv_heads
        self._natively = attends(stored, device, head_dim)
        self._chunk, self._chunked = chunk, frozenset(chunked)

    def attend(self, packed: PackedBatch | PackedTensors) -> Attend:
        """Return the attention function for all layers of one pass."""
        if isinstance(packed, PackedBatch) and self._natively:
            return NativeAttend(self.data, packed.slots_T, self._by_layer(packed, partial(_pages, packed)))
        tables = self._by_layer(packed, partial(self._prepared, packed))
        kind = RotatingPagedAttend if dispatch.on_gpu(self.data) else PagedAttend
        return kind(self.data, packed.slots_T, tables, self._scales)

    def _by_layer(self, packed: PackedBatch | PackedTensors, make: Callable[[Tensor | None], T]) -> list[T]:
        """Return what ``make`` returns for each layer from the first visible key of each sequence.

        None stands for the first keys of the pass. Chunked layers see no key before the chunk of the pass.
        """
        in_whole = make(None)
        if not self._chunked:
            return [in_whole] * len(self.data)
        start_B = packed.prefix_len_B // self._chunk * self._chunk
        if isinstance(packed, PackedTensors):
            start_B = torch.maximum(start_B, packed.key_start_B)
        elif any(packed.key_starts):
            start_B = torch.maximum(start_B, to_device(packed.key_starts, start_B.device, dtype=torch.int64))
        in_chunk = make(start_B)
        return [in_chunk if layer in self._chunked else in_whole for layer in range(len(self.data))]

    def _prepared(self, packed: PackedBatch | PackedTensors, start_B: Tensor | None) -> Prepared:
        if isinstance(packed, PackedTensors):
            return prepare_tables(
                query_start=packed.query_start,
                prefix_len_B=packed.prefix_len_B,
                key_start_B=packed.key_start_B if start_B is None else start_B,
                ancestors_T=packed.ancestors_T,
                block_table_BM=packed.block_table_BM,
                block_size=BLOCK_SIZE,
                groups=self._groups,
                kv_heads=self.data.shape[4],
            )
        return prepare(
            blocks=packed.blocks,
            block_table_BM=packed.block_table_BM,
            block_size=BLOCK_SIZE,
            query_counts=packed.query_counts,
            key_bounds=packed.key_bounds,
            prefix_len_B=packed.prefix_len_B,
            ancestors_T=packed.ancestors_T,
            key_starts=packed.key_starts if start_B is None else start_B,
            dense=packed.dense,
            groups=self._groups,
            dtype=self._dtype,
            kv_heads=self.data.shape[4],
            head_dim=self.data.shape[5],
            chunk_keys=packed.chunk_keys if start_B is None and self.data.dtype == self._dtype else (),
        )

    def write(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Write keys and values of one layer to these slots, outside of a pass."""
        write(self.data[layer], slots_T, k_TKD, v_TKD, self._scales[layer])

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.data.select(2, 0).numel() * self.data.element_size()

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """Return a copy of N whole blocks, [N, layers, 2, 16, heads, dim], as `bits` has them."""
        return self.bits.index_select(2, self._indices(blocks)).movedim(2, 0).contiguous()

    def blank_blocks(self, count: int) -> Tensor:
        """Return memory for ``count`` blocks, shaped as `read_blocks` returns them on this device."""
        return self.bits.new_empty(count, *self.bits.select(2, 0).shape)

    def write_blocks(self, blocks: Sequence[int], kv: Tensor) -> None:
        """Write N whole blocks, as `read_blocks` returns them; any shape with N first."""
        whole = kv.reshape(len(blocks), *self.data.select(2, 0).shape)
        self.bits.index_copy_(2, self._indices(blocks), whole.movedim(0, 2))

    def _indices(self, blocks: Sequence[int]) -> Tensor:
        return to_device(blocks, self.data.device, dtype=torch.int64)

    def keep(self, source_slots: Tensor, target_slots: Tensor, *, group: int | None = None) -> None:
        """Copy keys and values from source to target slots in all layers.

        Args:
            source_slots: Slots of the accepted nodes.
            target_slots: Slots of their final positions.
            group: Length of the runs of pairs within which sources and targets may overlap; see ``kv_keep``.
        """
        kv_keep(self.bits, source_slots, target_slots, group=group)


class PagedAttend:
    """``Attend`` that writes the keys and values of the pass to their slots, then attends over the paged keys."""

    def __init__(self, data: Tensor, slots_T: Tensor, prepared: Sequence[Prepared], scales: Sequence[Scales]) -> None:
        """Attend over ``data``, with what is ``prepared`` for each layer."""
        self._layers = data.unbind(0)
        self._slots_T, self._prepared, self._scales = slots_T, prepared, scales

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        write(self._layers[layer], self._slots_T, k_TKD, v_TKD, self._scales[layer])
        return attend(q_THD, self._layers[layer], self._prepared[layer], self._scales[layer])


class RotatingPagedAttend(PagedAttend, RotatingAttend):
    """``PagedAttend`` for GPUs, where one kernel applies the rotary embedding and writes keys and values."""

    def rotate_and_attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rope: PassRotations) -> Tensor:
        """Rotate queries and keys, write keys and values, and attend; arguments are not rotated yet."""
        cache, scales = self._layers[layer], self._scales[layer]
        turned_THD = rope_cache(
            q_THD, k_TKD, v_TKD, rope.cos_PD, rope.sin_PD, rope.positions_T, self._slots_T, cache, scales
        )
        return attend(turned_THD, cache, self._prepared[layer], scales)


class NativeAttend:
    """``Attend`` for CPUs that writes keys and values and attends in one compiled call per layer."""

    def __init__(self, data: Tensor, slots_T: Tensor, pages: Sequence[Pages]) -> None:
        """Attend over ``data``, with the ``pages`` of each layer."""
        self._layers = data.flatten(2, 3).unbind(0)
        self._slots_T, self._pages, self._scale = slots_T, pages, data.shape[-1] ** -0.5

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        keys, pages = self._layers[layer], self._pages[layer]
        return attend_natively(q_THD, k_TKD, v_TKD, keys, self._slots_T, pages, self._scale)


def _pages(packed: PackedBatch, start_B: Tensor | None) -> Pages:
    """Return the visible keys of a pass as the compiled attention reads them."""
    first_B = torch.tensor(packed.key_starts) if start_B is None else start_B
    return Pages(
        block_table_BM=packed.block_table_BM.contiguous(),
        block_size=BLOCK_SIZE,
        prefix_len_B=packed.prefix_len_B.contiguous(),
        first_B=first_B.contiguous(),
        query_start=torch.tensor(packed.query_start),
        ancestors_T=packed.ancestors_T.contiguous(),
    )
