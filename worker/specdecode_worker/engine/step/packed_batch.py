"""Inputs of one pass over packed tokens: prefill chunks, single tokens, chains and trees mixed in one batch.

Slots, positions and lengths are computed on the device from the per-slot state, because the host's copy of a length can
be one step behind. The number of queries of each sequence is known on the host. Target and draft passes use the same
inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE


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
