"""Work plan of one attention pass, computed on the device: tiles of queries cut into even pieces.

A tile is a few queries of one sequence. A piece is a tile and a run of its key blocks. The length of a run follows from
the sequence lengths, which only the device knows. The maximum number of pieces follows from the tensor sizes, which the
host knows. One launch therefore fits all lengths, including one long context among many short ones, and a captured
graph stays valid when the lengths change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdecode_kernels.dispatch import processors

BLOCK_N = 64
"""Number of keys that a program reads at a time."""
TREE_ROWS = 64
"""Number of bits of ``ancestors``: the maximum number of rows that a tree adds after its prefix."""
TILE_ROWS = 128
"""Most rows of a tile (a row is one query and one head of its group)."""
WAVES = 4
"""Most pieces per streaming multiprocessor, in addition to one per tile."""
PIECE_BLOCKS = 2
"""Fixed time of a piece (its start and its share of the merge), in times of a key block."""
LEAST_BLOCKS = 2
"""Minimum number of key blocks in a run. A shorter run costs more to merge than it saves."""
FIELDS = 10
_PIECES_AT_ONCE = 16
_BATCHES = (16, 64, 256)
"""Sequences that the planning kernel is compiled for; a batch is rounded up, so that few variants serve all."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Pieces of one attention pass and the tensors that `kernel.attend` reads with them.

    ``pieces_WF`` (int32) holds per piece: sequence, first packed query, number of queries, row of the first query after
    the prefix, first key block, end key, chunk number, number of chunks of the tile (0 for padding queries),
    length of the prefix, and first key that is not hidden. The pieces of a tile follow each other.
    """

    pieces_WF: Tensor
    block_table_BM: Tensor
    ancestors_T: Tensor
    block_size: int
    groups: int
    tile_queries: int


@triton.jit
def _run(tiles_B, blocks_B, most_chunks, kv_heads, processors, LEAST: tl.constexpr, PIECE: tl.constexpr):
    """Return the number of key blocks of a piece: of 16 lengths, the one whose pieces are estimated to end first.

    The processor with most pieces is the last to end. Lengths are 1 to 3 times the one that gives ``most_chunks``
    pieces. Among equals the longest is taken, which merges least.
    """
    least = tl.maximum(tl.cdiv(tl.sum(tiles_B * blocks_B, 0), most_chunks), LEAST)
    run_I = least + tl.arange(0, 16) * tl.cdiv(least, 8)
    chunks_IB = tl.maximum(tl.cdiv(blocks_B[None, :], run_I[:, None]), 1)
    pieces_I = tl.sum(tiles_B[None, :] * chunks_IB, 1) * kv_heads
    time_I = tl.cdiv(pieces_I, processors) * (tl.minimum(run_I, tl.max(blocks_B, 0)) + PIECE)
    return tl.max(tl.where(time_I == tl.min(time_I, 0), run_I, 0), 0)


@triton.jit(
    do_not_specialize=[
        "query_start",
        "prefix_len_B",
        "key_start_B",
        "ancestors_T",
        "batch",
        "tokens",
        "capacity",
        "tile",
    ]
)
def _plan_kernel(
    query_start,
    prefix_len_B,
    key_start_B,
    ancestors_T,
    pieces_WF,
    batch,
    tokens,
    capacity,
    most_chunks,
    kv_heads,
    processors,
    tile,
    KEYS: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Compute BLOCK_W pieces of the plan."""
    b = tl.arange(0, BLOCK_B)
    real = b < batch
    first_B = tl.load(query_start + b, mask=real, other=0).to(tl.int32)
    count_B = tl.load(query_start + b + 1, mask=real, other=0).to(tl.int32) - first_B
    prefix_B = tl.load(prefix_len_B + b, mask=real, other=0).to(tl.int32)
    start_B = tl.load(key_start_B + b, mask=real, other=0).to(tl.int32)
    causal_B = tl.load(ancestors_T + first_B, mask=real & (count_B > 0), other=1) == 0
    end_B = tl.minimum(prefix_B + tl.where(causal_B, count_B, ROWS), capacity)
    tiles_B = (count_B + tile - 1) // tile
    begin_B = start_B // KEYS
    blocks_B = tl.maximum((end_B + KEYS - 1) // KEYS - begin_B, 0)
    run = _run(tiles_B, blocks_B, most_chunks, kv_heads, processors, LEAST, PIECE)
    # A tile without keys still gets one chunk, because a program must write its zeros.
    chunks_B = tl.maximum((blocks_B + run - 1) // run, 1)
    ends_B = tl.cumsum(tiles_B * chunks_B, 0)

    w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    sequence_W = tl.sum(((ends_B[None, :] <= w[:, None]) & real[None, :]).to(tl.int32), 1)
    mine = b[None, :] == sequence_W[:, None]
    chunks_W = tl.sum(tl.where(mine, chunks_B[None, :], 0), 1)
    local_W = w - tl.sum(tl.where(mine, (ends_B - tiles_B * chunks_B)[None, :], 0), 1)
    used = sequence_W < batch
    row_W = tl.where(used, local_W // tl.maximum(chunks_W, 1), 0) * tile
    chunk_W = tl.where(used, local_W % tl.maximum(chunks_W, 1), 0)
    count_W = tl.sum(tl.where(mine, count_B[None, :], 0), 1)
    end_W = tl.sum(tl.where(mine, end_B[None, :], 0), 1)
    prefix_W = tl.sum(tl.where(mine, prefix_B[None, :], 0), 1)
    causal_end_W = prefix_W + tl.minimum(row_W + tile, count_W)
    causal_W = tl.sum(tl.where(mine, causal_B.to(tl.int32)[None, :], 0), 1) > 0
    end_W = tl.where(causal_W, tl.minimum(causal_end_W, end_W), end_W)
    from_W = tl.sum(tl.where(mine, begin_B[None, :], 0), 1) + chunk_W * run
    # Packed queries after the last sequence are padding; their output must be zeros.
    pad_row_W = tl.load(query_start + batch).to(tl.int32) + (w - tl.sum(tiles_B * chunks_B, 0)) * tile
    query_W = tl.where(used, tl.sum(tl.where(mine, first_B[None, :], 0), 1) + row_W, pad_row_W)
    rows_W = tl.minimum(tl.where(used, count_W - row_W, tokens - query_W), tile)

    piece = pieces_WF + w * FIELDS
    tl.store(piece, sequence_W)
    tl.store(piece + 1, query_W)
    tl.store(piece + 2, rows_W)
    tl.store(piece + 3, row_W)
    tl.store(piece + 4, from_W)
    tl.store(piece + 5, tl.minimum((from_W + run) * KEYS, end_W))
    tl.store(piece + 6, chunk_W)
    tl.store(piece + 7, tl.where(used, chunks_W, 0))
    tl.store(piece + 8, prefix_W)
    tl.store(piece + 9, tl.sum(tl.where(mine, start_B[None, :], 0), 1))


def plan(
    *,
    query_start: Tensor,
    prefix_len_B: Tensor,
    key_start_B: Tensor,
    ancestors_T: Tensor,
    block_table_BM: Tensor,
    block_size: int,
    groups: int,
    kv_heads: int,
) -> Plan:
    """Build the plan of one pass with a single small kernel launch, without waiting for the device.

    All layers of a pass share the plan. ``query_start`` [B + 1], ``prefix_len_B``, ``key_start_B`` and ``ancestors_T``
    are int64 on the device. Padding sequences own no queries. Packed queries from ``query_start[B]`` on see no keys and
    yield zeros.
    """
    tokens, (batch, columns) = len(ancestors_T), block_table_BM.shape
    tile = _tile_queries(tokens, batch, groups)
    multiprocessors = processors(ancestors_T)
    most_chunks = triton.cdiv(WAVES * multiprocessors, kv_heads)
    pieces = triton.cdiv(tokens // tile + batch + 1 + most_chunks, _PIECES_AT_ONCE) * _PIECES_AT_ONCE
    pieces_WF = torch.empty(pieces, FIELDS, dtype=torch.int32, device=ancestors_T.device)
    _plan_kernel[(pieces // _PIECES_AT_ONCE,)](
        query_start,
        prefix_len_B,
        key_start_B,
        ancestors_T,
        pieces_WF,
        batch,
        tokens,
        columns * block_size,
        most_chunks,
        kv_heads,
        multiprocessors,
        tile,
        KEYS=BLOCK_N,
        PIECE=PIECE_BLOCKS,
        ROWS=TREE_ROWS,
        FIELDS=FIELDS,
        LEAST=LEAST_BLOCKS,
        BLOCK_B=next((size for size in _BATCHES if batch <= size), triton.next_power_of_2(batch)),
        BLOCK_W=_PIECES_AT_ONCE,
    )
    return Plan(pieces_WF, block_table_BM, ancestors_T, block_size, groups, tile)


def _tile_queries(tokens: int, batch: int, groups: int) -> int:
    """Return the number of queries of a tile, a power of 2.

    It is the average number of queries of a sequence, limited to 16 to TILE_ROWS rows of the matrix unit (a row is one
    query and one head).
    """
    wanted: int = triton.next_power_of_2(triton.cdiv(tokens, batch))
    heads: int = triton.next_power_of_2(groups)
    return max(min(max(wanted, 16 // heads), TILE_ROWS // heads), 1)
