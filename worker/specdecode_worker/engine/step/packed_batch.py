"""One pass over packed tokens: prefill chunks, single tokens, chains and trees of different shapes, side by side.

Slots, positions and lengths are computed on the device from per-slot state, since the host's copy of a length may lag
a step; how many queries each sequence has, the host knows. Used by the target's pass and by the draft's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """T tokens of B sequences. Sequence b owns ``query_counts[b]`` of them, its first ``prefix_len_B[b]`` cached
    keys, and the keys that this pass writes behind them to ``slots_T``. ``ancestors_T`` is a bit mask of the rows
    behind the prefix, 0 for causal ones. ``key_bounds`` bounds each sequence's keys once they are written,
    ``key_starts`` hides the oldest (draft caches that begin late); ``dense`` says that the bounds are exact and that
    every query sees every key."""

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    prefix_len_B: Tensor
    ancestors_T: Tensor
    block_table_BM: Tensor
    blocks: tuple[tuple[int, ...], ...]
    query_counts: tuple[int, ...]
    key_bounds: tuple[int, ...]
    key_starts: tuple[int, ...]
    dense: bool

    @property
    def query_start(self) -> tuple[int, ...]:
        return tuple(accumulate(self.query_counts, initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The same as tensors alone, of which any part may be padding: ``query_start`` [B + 1] says whose queries are
    whose, what stands behind its last is nobody's. Nothing of it depends on the host, so a captured pass stays right
    when the tensors change."""

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    query_start: Tensor
    prefix_len_B: Tensor
    key_start_B: Tensor
    ancestors_T: Tensor
    block_table_BM: Tensor


def spread(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """(sequence [T], row within its sequence [T]) of packed tokens."""
    if len(counts) == 1:
        return torch.zeros(counts[0], dtype=torch.int64, device=device), torch.arange(counts[0], device=device)
    sequence = [b for b, count in enumerate(counts) for _ in range(count)]
    row = [i for count in counts for i in range(count)]
    sequence_T, row_T = to_device([sequence, row], device)
    return sequence_T, row_T


def slots_of(block_table_BM: Tensor, sequence_T: Tensor, index_T: Tensor) -> Tensor:
    """Cache slots of the given key indices of the given sequences."""
    block_T = block_table_BM[sequence_T, index_T // BLOCK_SIZE]
    return block_T * BLOCK_SIZE + index_T % BLOCK_SIZE
