"""Messages between rank 0 and the other ranks of a replica."""

from __future__ import annotations

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from specdecode_worker.contract import TargetQuantization
from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE
from specdecode_worker.engine.parallel.step_exchange import StepShape
from specdecode_worker.engine.step.packed_batch import PackedBatch


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Assignment of a rank: its shard of the target, its cache size, and the rendezvous with the other ranks."""

    rank: int
    size: int
    meeting: str
    """URL of the torch.distributed store."""
    folder: str
    dtype: str
    quantization: TargetQuantization | None
    device: str
    max_model_len: int | None
    blocks: int
    threads: int


class Forward(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Pass over T tokens of B sequences with logits for R of the tokens; its indices follow in one broadcast."""

    logit_rows: int
    table_columns: int
    query_counts: tuple[int, ...]
    key_bounds: tuple[int, ...]
    key_starts: tuple[int, ...]
    dense: bool
    blocks: tuple[tuple[int, ...], ...]
    """Cache blocks of each sequence, used on a CPU only; empty tuples on other devices."""


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Move of accepted keys and values; ``count`` pairs of source and target slots follow in one broadcast."""

    count: int


class Logits(msgspec.Struct, frozen=True, tag=True):
    """Computation of the logits of ``count`` hidden states, which follow in one broadcast; used for prompt logprobs."""

    count: int


class OpenTable(msgspec.Struct, frozen=True, tag=True):
    """Allocation of a copy of the block tables, which captured steps read; ``slots`` includes that of padding."""

    slots: int
    columns: int


class SetBlocks(msgspec.Struct, frozen=True, tag=True):
    """Entries of the block tables that changed: slots, columns and blocks, as in `DeviceState.set_blocks`."""

    entries: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Rehearsal of a step, without collectives, before it is captured. The rank answers with a `CaptureState`."""

    shape: StepShape


class Record(msgspec.Struct, frozen=True, tag=True):
    """Capture of the prepared step, after one run with all ranks. The rank answers with a `CaptureState`."""


class Replay(msgspec.Struct, frozen=True, tag=True):
    """Replay of a captured step. Its inputs follow in the collectives of the graph."""

    graph: int


class Discard(msgspec.Struct, frozen=True, tag=True):
    """Release of a captured step, or of all (None)."""

    graph: int | None = None


RankMessage = Forward | Keep | Logits | OpenTable | SetBlocks | Prepare | Record | Replay | Discard


class CaptureState(msgspec.Struct, frozen=True, tag=True):
    """Answer of a rank to `Prepare` and `Record`: how many steps it holds, and the reason of a failure, else empty."""

    graphs: int
    problem: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Notice that a rank has loaded its shard."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Last message of a rank that ends with an error."""

    reason: str


def encode_forward(packed: PackedBatch, logit_rows_R: Tensor) -> tuple[Forward, Tensor]:
    """Return the message that describes a pass, and all indices of the pass as one int64 tensor to broadcast."""
    columns = -(-max(packed.key_bounds) // BLOCK_SIZE)
    on_cpu = packed.tokens_T.device.type == "cpu"
    message = Forward(
        logit_rows=len(logit_rows_R),
        table_columns=columns,
        query_counts=packed.query_counts,
        key_bounds=packed.key_bounds,
        key_starts=packed.key_starts,
        dense=packed.dense,
        blocks=packed.blocks if on_cpu else ((),) * len(packed.query_counts),
    )
    parts = (packed.tokens_T, packed.positions_T, packed.slots_T, packed.ancestors_T, packed.prefix_len_B, logit_rows_R)
    return message, torch.cat((*parts, packed.block_table_BM[:, :columns].flatten()))


def receive_forward(message: Forward, device: torch.device) -> tuple[PackedBatch, Tensor]:
    """Receive the broadcast that follows ``message``, and return the pass and its logit rows."""
    tokens, sequences = sum(message.query_counts), len(message.query_counts)
    sizes = [tokens, tokens, tokens, tokens, sequences, message.logit_rows, sequences * message.table_columns]
    flat = torch.empty(sum(sizes), dtype=torch.int64, device=device)
    dist.broadcast(flat, src=0)
    tokens_T, positions_T, slots_T, ancestors_T, prefix_len_B, logit_rows_R, table = torch.split(flat, sizes)
    packed = PackedBatch(
        tokens_T=tokens_T,
        positions_T=positions_T,
        slots_T=slots_T,
        prefix_len_B=prefix_len_B,
        ancestors_T=ancestors_T,
        block_table_BM=table.view(sequences, -1),
        blocks=message.blocks,
        query_counts=message.query_counts,
        key_bounds=message.key_bounds,
        key_starts=message.key_starts,
        dense=message.dense,
    )
    return packed, logit_rows_R
