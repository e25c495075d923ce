"""Tensors that the bookkeeping of a step shares.

Suffixes: S slots, P positions, B sequences, M blocks, T packed rows, N nodes, D depth.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdecode_kernels.sample.reference import Truncation


@dataclass(frozen=True, slots=True)
class SlotState:
    """State of all slots: tokens, number of keys, and cache blocks of ``page`` positions."""

    tokens_SP: Tensor
    length_S: Tensor
    block_table_SM: Tensor
    page: int


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of a step, [B + 1]: their slots, and the index of their roots; the root index of padding is 0."""

    slots_B1: Tensor
    roots_B1: Tensor
    blocks_B1M: Tensor


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """Sampling parameters of the rows of a step, each [B + 1]. ``truncation`` is None if no row truncates."""

    temperature_B1: Tensor
    seed_B1: Tensor
    truncation: Truncation | None


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Packed rows of a pass, each [T].

    ``index_T`` is the index of the token in its text, ``places_T`` the slot of its key in the cache, and ``next_T`` the
    position of the token that is sampled behind it.
    """

    tokens_T: Tensor
    positions_T: Tensor
    places_T: Tensor
    slots_T: Tensor
    index_T: Tensor
    next_T: Tensor
    temperature_T: Tensor
    seed_T: Tensor
    truncation: Truncation | None


@dataclass(frozen=True, slots=True)
class Verified:
    """Verified trees: packed start of each sequence [B + 1], parents of the nodes [B, N], and the rows of the pass."""

    query_start: Tensor
    parents_BN: Tensor
    tokens_T: Tensor
    chosen_T: Tensor


@dataclass(frozen=True, slots=True)
class Committed:
    """Result of a step.

    ``out`` [B, 3 D + 3] holds emitted tokens (D + 1), path (D), ranks (D + 1) and the number of accepted nodes (1). The
    keys at ``source_BD`` move to ``target_BD``; both are 0 where nothing moves.
    """

    out: Tensor
    source_BD: Tensor
    target_BD: Tensor
