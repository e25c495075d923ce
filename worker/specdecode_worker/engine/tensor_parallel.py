"""Tensor parallelism within a replica: rank 0 runs the engine, the other ranks follow its target passes."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.util import Finalize
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.bound_process import BoundProcess
from specdecode_worker.contract import KVCacheDtype, TargetQuantization
from specdecode_worker.core.device_state import DeviceState, PackedBatch, PackedTensors, PagedCache
from specdecode_worker.core.errors import RankLost, crash_reason
from specdecode_worker.core.kv_cache import blocks_for
from specdecode_worker.drafts.registry import paged_cache
from specdecode_worker.engine.cuda_graphs import (
    Captured,
    CaptureFailed,
    EagerBackend,
    RankCaptureFailed,
    StagedBackend,
    Work,
    capture_backend,
)
from specdecode_worker.engine.target import Target, TargetPass
from specdecode_worker.models import collectives
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.linear import Shard
from specdecode_worker.models.optimize import fuse, quantise_target
from specdecode_worker.models.target_states import NO_STATES, TargetStates
from specdecode_worker.models.tensor_parallel import load_shard
from specdecode_worker.stages import stage

log = logging.getLogger(__name__)

# Exchange of a captured step: what the graphs of the other ranks need from that of rank 0.
#
# Rank 0 computes the inputs of the target's pass on its device: tokens from the draft, positions and slots from the
# state of the requests. Its graph broadcasts them to the graphs of the other ranks as one flat tensor; so no host
# copies them. The block tables of the rows are not part of it, as long texts make them large. Every rank has a copy of
# the table of all slots, which changes by the few blocks that requests take, and looks the rows up by their slots.


class StepShape(msgspec.Struct, frozen=True):
    """Sizes of a captured step: sequences, packed tokens, and depth of the trees, 0 without trees.

    The depth is the number of keys of each sequence that acceptance may move.
    """

    rows: int
    tokens: int
    depth: int

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each part of the flat tensor."""
        return [*[self.tokens] * 4, self.rows + 1, self.rows, self.rows]


def flatten(tables: PackedTensors, slots_B: Tensor) -> Tensor:
    """Return the inputs of a pass as one flat tensor. ``slots_B`` are the slots of the sequences."""
    of_tokens = (tables.tokens_T, tables.positions_T, tables.slots_T, tables.ancestors_T)
    return torch.cat((*of_tokens, tables.query_start, tables.prefix_len_B, slots_B))


def unflatten(flat: Tensor, shape: StepShape, table_SM: Tensor, key_start_B: Tensor) -> PackedTensors:
    """Return the inputs of a pass as views of a flat tensor, with the blocks of the rows from ``table_SM``."""
    parts = torch.split(flat, shape.sizes)
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


# Messages between rank 0 and the other ranks of a replica.


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Assignment of a rank: its shard of the target, its cache size, and the rendezvous with the other ranks."""

    rank: int
    size: int
    meeting: str
    """URL of the torch.distributed store."""
    folder: str
    dtype: str
    quantization: TargetQuantization | None
    kv_cache_dtype: KVCacheDtype = "auto"
    device: str
    max_model_len: int | None
    blocks: int
    threads: int


class Forward(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Pass over T tokens of B sequences with logits for R of the tokens; its indices follow in one broadcast."""

    logit_rows: int
    query_counts: tuple[int, ...]
    key_bounds: tuple[int, ...]
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


class RecordStep(msgspec.Struct, frozen=True, tag=True):
    """Capture of the prepared step, after one run with all ranks. The rank answers with a `CaptureState`."""


class ReadBlocks(msgspec.Struct, frozen=True, tag=True):
    """Copy of these cache blocks, which rank 0 gathers."""

    blocks: tuple[int, ...]


class WriteBlocks(msgspec.Struct, frozen=True, tag=True):
    """Write to these cache blocks. Rank 0 scatters their contents."""

    blocks: tuple[int, ...]


class Replay(msgspec.Struct, frozen=True, tag=True):
    """Replay of a captured step. Its inputs follow in the collectives of the graph."""

    graph: int


class Discard(msgspec.Struct, frozen=True, tag=True):
    """Release of a captured step, or of all (None)."""

    graph: int | None = None


RankMessage = (
    Forward | Keep | Logits | OpenTable | SetBlocks | ReadBlocks | WriteBlocks | Prepare | RecordStep | Replay | Discard
)


class CaptureState(msgspec.Struct, frozen=True, tag=True):
    """Answer of a rank to `Prepare` and `RecordStep`: how many steps it holds, and the reason of a failure."""

    graphs: int
    problem: str = ""


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """Notice that a rank has loaded its shard."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """Last message of a rank that ends with an error."""

    reason: str


def encode_forward(packed: PackedBatch, logit_rows_R: Tensor) -> tuple[Forward, Tensor]:
    """Return the message that describes a pass, and all indices of the pass as one int64 tensor to broadcast."""
    on_cpu = packed.tokens_T.device.type == "cpu"
    message = Forward(
        logit_rows=len(logit_rows_R),
        query_counts=packed.query_counts,
        key_bounds=packed.key_bounds,
        dense=packed.dense,
        blocks=packed.blocks if on_cpu else ((),) * len(packed.query_counts),
    )
    parts = (packed.tokens_T, packed.positions_T, packed.slots_T, packed.ancestors_T, packed.prefix_len_B, logit_rows_R)
    return message, torch.cat((*parts, packed.block_table_BM[:, : blocks_for(max(packed.key_bounds))].flatten()))


def receive_forward(message: Forward, device: torch.device) -> tuple[PackedBatch, Tensor]:
    """Receive the broadcast that follows ``message``, and return the pass and its logit rows."""
    tokens, sequences = sum(message.query_counts), len(message.query_counts)
    columns = blocks_for(max(message.key_bounds))
    sizes = [tokens, tokens, tokens, tokens, sequences, message.logit_rows, sequences * columns]
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
        key_starts=(0,) * sequences,
        dense=message.dense,
    )
    return packed, logit_rows_R


# Captured steps of a rank other than 0: the target's part of each step of rank 0, with the collectives inside.


def problem_of(stage: Callable[[], None]) -> str:
    """Run a stage of a capture, and return the reason if it fails, else nothing. Raise RankLost if a rank ended."""
    try:
        stage()
    except RankLost:
        raise
    except Exception as error:
        log.warning("this rank cannot capture a step", exc_info=True)
        return f"{type(error).__name__}: {error}"
    return ""


class RankStep:
    """Target part of one captured step, over static tensors that the graph of rank 0 fills.

    The collectives are those of rank 0, in the same order: inputs, those of the target, and moves of accepted keys.
    """

    def __init__(self, shape: StepShape, model: CausalLM, cache: PagedCache, table_SM: Tensor) -> None:
        self._shape, self._model, self._cache, self._table_SM = shape, model, cache, table_SM
        # Before the first broadcast, all tokens are padding of slot 0, whose keys are in the padding block.
        self._flat = torch.zeros(sum(shape.sizes), dtype=torch.int64, device=table_SM.device)
        self._key_start_B = torch.zeros(shape.rows, dtype=torch.int64, device=table_SM.device)
        self._pairs = torch.zeros(2, shape.rows * shape.depth, dtype=torch.int64, device=table_SM.device)

    def run(self) -> None:
        """Queue the step."""
        collectives.broadcast(self._flat)
        tables = unflatten(self._flat, self._shape, self._table_SM, self._key_start_B)
        Target.run(self._model, self._cache, tables, tables.tokens_T, NO_STATES)
        if self._shape.depth:
            collectives.broadcast(self._pairs)
            self._cache.keep(self._pairs[0], self._pairs[1], group=self._shape.depth)


class RankGraphs:
    """All captured steps of a rank other than 0, by their number in the order in which rank 0 captured its own."""

    def __init__(self, model: CausalLM, cache: PagedCache, backend: StagedBackend) -> None:
        """Create an empty set."""
        self._model, self._cache, self._backend = model, cache, backend
        self._table_SM: Tensor | None = None
        self._prepared: RankStep | None = None
        self._captures = 0
        """Number of steps captured since all were last discarded, those discarded one by one included."""
        self._graphs: dict[int, tuple[RankStep, Work]] = {}
        """Steps and their replays. A graph refers to the static tensors of its step and does not keep them alive."""

    def __len__(self) -> int:
        return len(self._graphs)

    def open_table(self, slots: int, columns: int) -> None:
        """Allocate the copy of the block tables of all slots."""
        self._table_SM = torch.zeros(slots, columns, dtype=torch.int64, device=self._cache.data.device)

    def set_blocks(self, entries: tuple[tuple[int, ...], ...]) -> None:
        """Write entries of the block tables: slots, columns and blocks, as in `DeviceState.set_blocks`."""
        assert self._table_SM is not None, "rank 0 opens the table first"
        slots_N, columns_N, blocks_N = to_device(entries, self._table_SM.device)
        self._table_SM[slots_N, columns_N] = blocks_N

    def prepare(self, shape: StepShape) -> None:
        """Build a step and rehearse it without collectives. Raise whatever makes it impossible here."""
        assert self._table_SM is not None, "rank 0 opens the table first"
        self._prepared = RankStep(shape, self._model, self._cache, self._table_SM)
        with collectives.rehearsal():
            self._backend.warm_up(self._prepared.run)

    def warm_up(self) -> None:
        """Run the prepared step once with the other ranks.

        NCCL connects the ranks here, which may not happen during a capture:
        https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html
        """
        assert self._prepared is not None, "the step is prepared"
        self._backend.warm_up(self._prepared.run)

    def record(self) -> None:
        """Capture the prepared step. Raise whatever makes it impossible here."""
        assert self._prepared is not None, "the step is prepared"
        self._graphs[self._captures] = self._prepared, self._backend.record(self._prepared.run)
        self._captures += 1
        self._prepared = None

    def replay(self, number: int) -> None:
        """Queue the captured step of this number."""
        _, replay = self._graphs[number]
        replay()

    def discard(self, number: int) -> None:
        """Discard the captured step of this number."""
        del self._graphs[number]

    def clear(self) -> None:
        """Discard all steps."""
        self._prepared = None
        self._graphs.clear()
        self._captures = 0
        self._backend.clear()


# Process of a rank other than 0: it holds its shard of the target and runs the passes that rank 0 sends.

COLLECTIVE_TIMEOUT = timedelta(minutes=60)
"""Timeout of collectives. It must cover the load time of the slowest rank; later, ranks wait only within a pass."""


def serve_rank(assignment: bytes, pipe: Connection) -> None:
    """Run the process of a rank. Exit with 0 when rank 0 closes the pipe, with 1 after a RankFailed message."""
    try:
        _serve(msgspec.msgpack.decode(assignment, type=Assignment), pipe)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # rank 0 is gone, so an orderly shutdown of the process group is impossible
    except Exception as error:
        pipe.send_bytes(msgspec.msgpack.encode(RankFailed(crash_reason(error))))
        os._exit(1)


def load_rank_shard(assignment: Assignment) -> tuple[CausalLM, torch.device]:
    """Join the process group of all ranks and load the shard of this rank. Return the shard and its device."""
    device = (
        torch.device(assignment.device, assignment.rank)
        if assignment.device == "cuda"
        else torch.device(assignment.device)
    )
    torch.set_num_threads(assignment.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # NCCL would register the buffers of captured collectives, for which ranks may exchange addresses during the
        # capture: a rank that fails to capture would leave the others waiting there.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks of a replica run on one machine
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=assignment.meeting,
        rank=assignment.rank,
        world_size=assignment.size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    model = load_shard(
        Path(assignment.folder),
        Shard(assignment.rank, assignment.size),
        dtype=getattr(torch, assignment.dtype),
        # A part that fits only after quantization must not be moved to the device before it.
        device=torch.device("cpu") if assignment.quantization else device,
        max_model_len=assignment.max_model_len,
    )
    with stage("fuse"):
        quantise_target(model, assignment.quantization, device)
        fuse(model)
    return model, device


@torch.inference_mode()
def _serve(assignment: Assignment, pipe: Connection) -> None:
    model, device = load_rank_shard(assignment)
    dtype = getattr(torch, assignment.dtype)
    scales = model.kv_scales if assignment.kv_cache_dtype == "fp8" else ()
    cache = paged_cache(model.config, model.config.num_hidden_layers, assignment.blocks, dtype, device, scales)
    graphs = RankGraphs(model, cache, capture_backend(device) or EagerBackend())
    pipe.send_bytes(msgspec.msgpack.encode(RankReady()))
    decoder = msgspec.msgpack.Decoder(RankMessage)
    while True:
        match decoder.decode(pipe.recv_bytes()):
            case Replay(graph):
                graphs.replay(graph)
            case SetBlocks(entries):
                graphs.set_blocks(entries)
            case Forward() as message:
                packed, logit_rows_R = receive_forward(message, device)
                Target.run(model, cache, packed, logit_rows_R, NO_STATES)
            case Keep(count):
                pairs = torch.empty(2, count, dtype=torch.int64, device=device)
                dist.broadcast(pairs, src=0)
                cache.keep(*pairs)
            case Logits(count):
                hidden_RE = torch.empty(count, model.config.hidden_size, dtype=dtype, device=device)
                dist.broadcast(hidden_RE, src=0)
                model.logits(hidden_RE)
            case ReadBlocks(blocks):
                dist.gather(cache.read_blocks(blocks), dst=0)
            case WriteBlocks(blocks):
                own = cache.blank_blocks(len(blocks))
                dist.scatter(own, src=0)
                cache.write_blocks(blocks, own)
            case OpenTable(slots, columns):
                graphs.open_table(slots, columns)
            case Prepare(shape):
                _answer(pipe, graphs, partial(graphs.prepare, shape))
            case RecordStep():
                graphs.warm_up()
                _answer(pipe, graphs, graphs.record)
            case Discard(None):
                graphs.clear()
            case Discard(int(graph)):
                graphs.discard(graph)


def _answer(pipe: Connection, graphs: RankGraphs, stage: Callable[[], None]) -> None:
    """Run one stage of a capture, and tell rank 0 how it ended."""
    problem = problem_of(stage)
    pipe.send_bytes(msgspec.msgpack.encode(CaptureState(len(graphs), problem)))


# Process group of the ranks of a replica, as managed by rank 0.
#
# Rank 0 starts the other ranks, sends them their work, and ends when one of them ends.

_STUCK_SECONDS = 10.0
"""Time after the loss of a rank before the process exits, and as much to close the group. A NCCL collective whose peer
died may never return, and the end of the process group waits for it."""
_REASON_SECONDS = 1.0
"""Time to wait for the reason of a failed collective, and for the exit code of a lost rank."""


class RankGroup:
    """Ranks 1 and up of a replica, as managed by rank 0. A process can have one group at a time."""

    def __init__(self, whole: Assignment) -> None:
        """Start the other ranks, which begin to load. ``whole`` is the assignment of rank 0, without ``meeting``."""
        self._folder = tempfile.mkdtemp(prefix="specdecode-ranks-")
        self._own = msgspec.structs.replace(whole, meeting=f"file://{self._folder}/store")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RankReady | RankFailed | CaptureState)
        self._states: list[SimpleQueue[CaptureState]] = [SimpleQueue() for _ in range(1, whole.size)]
        self._pipes: list[Connection] = []
        self._processes = [self._start(number) for number in range(1, whole.size)]
        self._loaded, self._closing, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._lost = ""
        # At the exit of the interpreter, before the ranks would be killed.
        self._finalizer = Finalize(self, self.close, exitpriority=10)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._interrupt)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def load(self) -> tuple[CausalLM, torch.device]:
        """Load the shard of rank 0 and wait until all ranks have loaded theirs.

        Raises:
            ModelError: The target cannot be loaded.
            RankLost: Another rank ended or failed to load.
        """
        try:
            with self.collective():
                shard_and_device = load_rank_shard(self._own)
                while not self._loaded.wait(_REASON_SECONDS):
                    self._raise_if_lost()
        except BaseException:
            self.close()
            raise
        return shard_and_device

    def send(self, message: RankMessage) -> None:
        """Send a message that no broadcast follows to the other ranks."""
        with self.collective():
            encoded = self._encoder.encode(message)
            for pipe in self._pipes:
                pipe.send_bytes(encoded)

    def send_with(self, message: RankMessage, data: Tensor) -> None:
        """Send a message to the other ranks, and broadcast the tensor that they expect behind it."""
        self.send(message)
        with self.collective():
            dist.broadcast(data.contiguous(), src=0)

    def capture_states(self) -> list[CaptureState]:
        """Wait for the other ranks' answers to a stage of a capture, and return them in the order of the ranks."""
        return [self._state(states) for states in self._states]

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Run a collective operation. Raise RankLost, with the rank and its reason, if the loss of a rank broke it."""
        try:
            yield
        except (EOFError, OSError, RuntimeError) as error:
            deadline = time.monotonic() + _REASON_SECONDS
            while not self._lost and time.monotonic() < deadline:
                time.sleep(0.01)
            self._raise_if_lost()
            raise error

    def close(self) -> None:
        """End the other ranks. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 5
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        finally:
            self._closed.set()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, number: int) -> BoundProcess:
        own_end, rank_end = Pipe()
        assignment = self._encoder.encode(msgspec.structs.replace(self._own, rank=number))
        process = BoundProcess(serve_rank, (assignment, rank_end), f"specdecode-rank-{number}")
        process.start()
        rank_end.close()
        self._pipes.append(own_end)
        return process

    def _state(self, states: SimpleQueue[CaptureState]) -> CaptureState:
        while True:
            with contextlib.suppress(Empty):
                return states.get(timeout=_REASON_SECONDS)
            self._raise_if_lost()

    def _watch(self) -> None:
        """Read the messages of all ranks in a thread until one of them ends, which ends the replica."""
        numbers = {pipe: number for number, pipe in enumerate(self._pipes, start=1)}
        loading = set(numbers.values())
        while not self._closing.is_set():
            for pipe in self._readable_pipes(numbers):
                match self._read_message(numbers[pipe], pipe):
                    case RankReady():
                        loading.discard(numbers[pipe])
                    case CaptureState() as state:
                        self._states[numbers[pipe] - 1].put(state)
                    case RankFailed(reason):
                        if not self._closing.is_set():
                            self._lost = f"rank {numbers[pipe]}: {reason}"
                            self._end()
                        return
            if not loading:
                self._loaded.set()

    @staticmethod
    def _readable_pipes(pipes: Iterable[Connection]) -> list[Connection]:
        try:
            # With a time limit, because a rank does not see the end of a pipe that this thread waits for.
            return wait(list(pipes), timeout=0.2)  # type: ignore[return-value]
        except OSError:  # a pipe was closed meanwhile
            return []

    def _read_message(self, number: int, pipe: Connection) -> RankReady | RankFailed | CaptureState:
        """Read one message of a rank; the end of the pipe counts as RankFailed."""
        message: RankReady | RankFailed | CaptureState
        try:
            message = self._decoder.decode(pipe.recv_bytes())
        except msgspec.MsgspecError as error:
            message = RankFailed(f"sent a message that cannot be read: {error}")
        except (EOFError, OSError):
            process = self._processes[number - 1]
            process.join(_REASON_SECONDS)
            message = RankFailed(f"ended with exit code {process.exitcode}")
        return message

    def _end(self) -> None:
        """Raise RankLost in the main thread by a signal; exit if the main thread does not close the group in time."""
        os.kill(os.getpid(), signal.SIGUSR1)
        if not (self._closing.wait(_STUCK_SECONDS) and self._closed.wait(_STUCK_SECONDS)):
            print(f"specdecode-worker: {self._lost}", file=sys.stderr, flush=True)
            os._exit(1)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._closing.is_set():
            self._raise_if_lost()

    def _raise_if_lost(self) -> None:
        if self._lost:
            raise RankLost(self._lost)


# Target, KV cache and block tables of rank 0, which announce every operation to the other ranks before they run it.
#
# In a captured step nothing is announced: the collectives are part of the graphs of all ranks (`LeaderBackend`).


class LeaderState(DeviceState):
    """Device state whose block tables the other ranks copy, because their captured steps read them."""

    def __init__(
        self, slots: int, max_model_len: int, dtype: torch.dtype, device: torch.device, group: RankGroup
    ) -> None:
        super().__init__(slots, max_model_len, dtype, device)
        self._ranks = group
        group.send(OpenTable(*self.block_table_SM.shape))

    def set_blocks(self, slots: list[int], columns: list[int], blocks: list[int]) -> None:
        """Write entries of the block tables on all ranks."""
        self._ranks.send(SetBlocks((tuple(slots), tuple(columns), tuple(blocks))))
        super().set_blocks(slots, columns, blocks)


class LeaderCache(PagedCache):
    """KV cache of the attention heads of rank 0. All ranks use the same block numbers."""

    def __init__(self, own: PagedCache, group: RankGroup) -> None:
        vars(self).update(vars(own))
        self._ranks = group

    def keep(self, source_slots: Tensor, target_slots: Tensor, *, group: int | None = None) -> None:
        """Move the keys and values of accepted nodes on all ranks. Raise RankLost if another rank ends meanwhile."""
        self._ranks.send_with(Keep(len(source_slots)), torch.stack((source_slots, target_slots)))
        super().keep(source_slots, target_slots, group=group)

    @property
    def block_bytes(self) -> int:
        """Bytes of the keys and values of one block, on all devices together."""
        return super().block_bytes * dist.get_world_size()

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """Gather the keys and values of N whole blocks from all ranks, [N, rank, ...]."""
        self._ranks.send(ReadBlocks(tuple(blocks)))
        own = super().read_blocks(blocks)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        with self._ranks.collective():
            dist.gather(own, parts, dst=0)
        return torch.stack(parts, 1)

    def write_blocks(self, blocks: Sequence[int], kv: Tensor) -> None:
        """Scatter the keys and values of N whole blocks to all ranks."""
        self._ranks.send(WriteBlocks(tuple(blocks)))
        own = self.blank_blocks(len(blocks))
        by_rank = kv.reshape(len(blocks), dist.get_world_size(), -1).unbind(1)
        parts = [part.contiguous().view_as(own) for part in by_rank]
        with self._ranks.collective():
            dist.scatter(own, parts, src=0)
        super().write_blocks(blocks, own)


class LeaderTarget(Target):
    """Shard of the target network on rank 0."""

    def __init__(self, model: CausalLM, cache: PagedCache, state: DeviceState, group: RankGroup) -> None:
        super().__init__(model, LeaderCache(cache, group), state)
        self._ranks = group
        self._shape: StepShape | None = None
        """Sizes of the last pass over tables."""

    def forward(self, step: TargetPass, reads: TargetStates) -> tuple[Tensor, Tensor | None, Tensor]:
        """Run a pass on all ranks. Raise RankLost if another rank ends meanwhile."""
        self._ranks.send_with(*encode_forward(step.packed, step.logit_rows_R))
        with self._ranks.collective():
            return super().forward(step, reads)

    def forward_tables(
        self, tables: PackedTensors, slots_B: Tensor, reads: TargetStates
    ) -> tuple[Tensor, Tensor | None]:
        """Run a pass of a captured step, whose other ranks run their graphs of it."""
        self._shape = StepShape(len(slots_B), len(tables.tokens_T), 0)
        collectives.broadcast(flatten(tables, slots_B))
        return super().forward_tables(tables, slots_B, reads)

    def keep_tables(self, source_BD: Tensor, target_BD: Tensor) -> None:
        """Move the accepted keys of a captured step, whose other ranks run their graphs of it."""
        assert self._shape is not None, "keys are kept after a pass"
        depth = source_BD.shape[1]
        self._shape = msgspec.structs.replace(self._shape, depth=depth)
        source, target = source_BD.flatten(), target_BD.flatten()
        collectives.broadcast(torch.stack((source, target)))
        PagedCache.keep(self.cache, source, target, group=depth)  # of this rank alone

    def take_shape(self) -> StepShape | None:
        """Return the sizes of the last pass over tables since the last call, None if there was none."""
        shape, self._shape = self._shape, None
        return shape

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Compute logits on all ranks: [T, V]. Raise RankLost if another rank ends meanwhile."""
        self._ranks.send_with(Logits(len(hidden_TE)), hidden_TE)
        with self._ranks.collective():
            return super().logits(hidden_TE)

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()


# Capture of steps on all ranks at once: one graph per rank, with the collectives inside.
#
# A collective that some ranks capture and others do not, or a replay that some ranks miss, would leave ranks waiting
# for ever: NCCL requires that all ranks capture a collective and replay the graphs of one capture together
# (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html). So all ranks capture the same steps
# in the same order, in stages, and go on only if all have succeeded:
#
#     rank 0   rehearse, send Prepare, read answers, send Record, run, capture, read answers | send Replay, replay
#     rank r                           rehearse, answer           run, capture, answer       |              replay
#
# Nothing waits for another rank in a rehearsal, which leaves the collectives out, and in a capture, which runs nothing.
# Only these two stages may fail; a rank whose run fails ends, as in an eager step, and the replica with it.
#
# torch hands no events of captured collectives to the watchdog of NCCL, so its error handling needs no setting
# (https://github.com/pytorch/pytorch/pull/102542). A replay that hangs is found by the watchdog of the engine instead.
# vLLM captures the collectives of its ranks into one graph per rank, too
# (https://github.com/vllm-project/vllm/pull/4818).


class LeaderBackend:
    """`CaptureBackend` of rank 0. ``own`` captures on this rank."""

    def __init__(self, own: StagedBackend, target: LeaderTarget, group: RankGroup) -> None:
        self._own, self._target, self._ranks = own, target, group
        self._captures = 0
        self._graphs: set[int] = set()
        """Numbers of the captured steps that the ranks hold."""

    def capture(self, work: Work) -> Captured:
        """Capture ``work`` on this rank and the target's part of it on the others, if it has one.

        Raises:
            CaptureFailed: This rank cannot capture the work, and came to no pass of the target.
            RankCaptureFailed: A rank cannot capture it. No rank may replay the steps that it captured before.
            RankLost: Another rank ended meanwhile.
        """
        self._target.take_shape()
        problem = problem_of(lambda: self._rehearse(work))
        shape = self._target.take_shape()
        if shape is None:  # draft passes alone, which run on this rank, or a step that came to no pass of the target
            if problem:
                raise CaptureFailed(f"rank 0: {problem}")
            return self._own.capture(work)
        _require([problem])
        self._ranks.send(Prepare(shape))
        _require(["", *(state.problem for state in self._ranks.capture_states())])
        self._ranks.send(RecordStep())
        replays: list[Work] = []
        with self._ranks.collective():
            self._own.warm_up(work)
        problem = problem_of(lambda: replays.append(self._own.record(work)))
        states = self._ranks.capture_states()
        _require([problem, *(state.problem for state in states)])
        number, self._captures = self._captures, self._captures + 1
        self._graphs.add(number)
        assert all(state.graphs == len(self._graphs) for state in states), "all ranks hold the same graphs"
        log.info("%d graphs on each of %d ranks", len(self._graphs), 1 + len(states))
        captured = self._own.timed(lambda: self._replay(number, replays[0]))
        return replace(captured, release=lambda: self._release(number))

    def clear(self) -> None:
        """Release the captured steps of all ranks."""
        self._captures = 0
        self._graphs.clear()
        self._ranks.send(Discard())
        self._own.clear()

    def _rehearse(self, work: Work) -> None:
        with collectives.rehearsal():
            self._own.warm_up(work)

    def _replay(self, number: int, replay: Work) -> None:
        """Queue a captured step on all ranks. Raise RankLost if another rank ends meanwhile."""
        self._ranks.send(Replay(number))
        with self._ranks.collective():
            replay()

    def _release(self, number: int) -> None:
        """Release one captured step on all ranks."""
        self._graphs.remove(number)
        self._ranks.send(Discard(number))


def _require(problems: Sequence[str]) -> None:
    """Raise RankCaptureFailed if a rank has a problem. They are in the order of the ranks, empty for those without."""
    failed = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if failed:
        raise RankCaptureFailed("; ".join(failed))
