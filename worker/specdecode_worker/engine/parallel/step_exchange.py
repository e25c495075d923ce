"""Exchange of a captured step: what the graphs of the other ranks need from that of rank 0.

Rank 0 computes the inputs of the target's pass on its device: tokens from the draft, positions and slots from the state
of the requests. Its graph broadcasts them to the graphs of the other ranks as one flat tensor; so no host copies them.
The block tables of the rows are not part of it, as long texts make them large. Every rank has a copy of the table
of all slots, which changes by the few blocks that requests take, and looks the rows up by their slots.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from specdecode_worker.engine.step.packed_batch import PackedTensors


class StepShape(msgspec.Struct, frozen=True):
    """Sizes of a captured step: sequences, packed tokens, and depth of the trees, 0 without trees.

    The depth is the number of keys of each sequence that acceptance may move.
    """

    rows: int
    tokens: int
    depth: int


def flat_size(shape: StepShape) -> int:
    """Return the number of elements of the flat tensor."""
    return sum(_sizes(shape))


def flatten(tables: PackedTensors, slots_B: Tensor) -> Tensor:
    """Return the inputs of a pass as one flat tensor. ``slots_B`` are the slots of the sequences."""
    of_tokens = (tables.tokens_T, tables.positions_T, tables.slots_T, tables.ancestors_T)
    return torch.cat((*of_tokens, tables.query_start, tables.prefix_len_B, slots_B))


def unflatten(flat: Tensor, shape: StepShape, table_SM: Tensor, key_start_B: Tensor) -> PackedTensors:
    """Return the inputs of a pass as views of a flat tensor, with the blocks of the rows from ``table_SM``."""
    parts = torch.split(flat, _sizes(shape))
    tokens_T, positions_T, slots_T, ancestors_T, query_start, prefix_len_B, row_slots_B = parts
    return PackedTensors(
        tokens_T=tokens_T,
        positions_T=positions_T,
        slots_T=slots_T,
        query_start=query_start,
        prefix_len_B=prefix_len_B,
        key_start_B=key_start_B,
        ancestors_T=ancestors_T,
        block_table_BM=table_SM[row_slots_B],
    )


def _sizes(shape: StepShape) -> list[int]:
    return [*[shape.tokens] * 4, shape.rows + 1, shape.rows, shape.rows]
