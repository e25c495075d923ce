"""Process group of the ranks of a replica, as managed by rank 0.

Rank 0 starts the other ranks, sends them their work, and ends when one of them ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.util import Finalize
from queue import Empty, SimpleQueue
from types import FrameType

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from specdecode_worker.bound_process import BoundProcess
from specdecode_worker.engine.errors import RankLost
from specdecode_worker.engine.parallel import rank_process
from specdecode_worker.engine.parallel.rank_messages import (
    Assignment,
    CaptureState,
    Failed,
    Keep,
    Logits,
    RankMessage,
    Ready,
    encode_forward,
)
from specdecode_worker.engine.step.packed_batch import PackedBatch
from specdecode_worker.models.networks.llama import Llama

_STUCK_SECONDS = 10.0
"""Time after the loss of a rank before the process exits. A NCCL collective whose peer died may never return."""
_REASON_SECONDS = 1.0
"""Time to wait for the reason of a failed collective, and for the exit code of a lost rank."""


class RankGroup:
    """Ranks 1 and up of a replica, as managed by rank 0. A process can have one group at a time."""

    def __init__(self, whole: Assignment) -> None:
        """Start the other ranks, which begin to load. ``whole`` is the assignment of rank 0, without ``meeting``."""
        self._folder = tempfile.mkdtemp(prefix="specdecode-ranks-")
        self._own = msgspec.structs.replace(whole, meeting=f"file://{self._folder}/store")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Ready | Failed | CaptureState)
        self._states: list[SimpleQueue[CaptureState]] = [SimpleQueue() for _ in range(1, whole.size)]
        self._pipes: list[Connection] = []
        self._processes = [self._start(number) for number in range(1, whole.size)]
        self._loaded, self._closing, self._lost = threading.Event(), threading.Event(), ""
        # At the exit of the interpreter, before the ranks would be killed.
        self._finalizer = Finalize(self, self.close, exitpriority=10)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._interrupt)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def load(self) -> tuple[Llama, torch.device]:
        """Load the shard of rank 0 and wait until all ranks have loaded theirs.

        Raises:
            ModelError: The target cannot be loaded.
            RankLost: Another rank ended or failed to load.
        """
        try:
            with self.collective():
                shard_and_device = rank_process.load_rank_shard(self._own)
                while not self._loaded.wait(_REASON_SECONDS):
                    self._raise_if_lost()
        except BaseException:
            self.close()
            raise
        return shard_and_device

    def forward(self, packed: PackedBatch, logit_rows_R: Tensor) -> None:
        """Start this pass on the other ranks; it ends when its logits are gathered."""
        self._send_with(*encode_forward(packed, logit_rows_R))

    def keep(self, source_slots: Tensor, target_slots: Tensor) -> None:
        """Move accepted keys and values from ``source_slots`` to ``target_slots`` on the other ranks."""
        self._send_with(Keep(len(source_slots)), torch.stack((source_slots, target_slots)))

    def logits(self, hidden_RE: Tensor) -> None:
        """Start the computation of logits of ``hidden_RE`` on the other ranks."""
        self._send_with(Logits(len(hidden_RE)), hidden_RE)

    def send(self, message: RankMessage) -> None:
        """Send a message that no broadcast follows to the other ranks."""
        with self.collective():
            encoded = self._encoder.encode(message)
            for pipe in self._pipes:
                pipe.send_bytes(encoded)

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
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        if dist.is_initialized():
            dist.destroy_process_group()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, number: int) -> BoundProcess:
        own_end, rank_end = Pipe()
        assignment = self._encoder.encode(msgspec.structs.replace(self._own, rank=number))
        process = BoundProcess(rank_process.main, (assignment, rank_end), f"specdecode-rank-{number}")
        process.start()
        rank_end.close()
        self._pipes.append(own_end)
        return process

    def _state(self, states: SimpleQueue[CaptureState]) -> CaptureState:
        while True:
            with contextlib.suppress(Empty):
                return states.get(timeout=_REASON_SECONDS)
            self._raise_if_lost()

    def _send_with(self, message: RankMessage, data: Tensor) -> None:
        self.send(message)
        with self.collective():
            dist.broadcast(data.contiguous(), src=0)

    def _watch(self) -> None:
        """Read the messages of all ranks in a thread until one of them ends, which ends the replica."""
        numbers = {pipe: number for number, pipe in enumerate(self._pipes, start=1)}
        loading = set(numbers.values())
        while not self._lost:
            for pipe in self._readable_pipes(numbers):
                match self._read_message(numbers[pipe], pipe):
                    case Ready():
                        loading.discard(numbers[pipe])
                    case CaptureState() as state:
                        self._states[numbers[pipe] - 1].put(state)
                    case Failed(reason):
                        self._lost = self._lost or f"rank {numbers[pipe]}: {reason}"
            if self._closing.is_set():
                return
            if not loading:
                self._loaded.set()
        self._end()

    @staticmethod
    def _readable_pipes(pipes: Iterable[Connection]) -> list[Connection]:
        try:
            # With a time limit, because a rank does not see the end of a pipe that this thread waits for.
            return wait(list(pipes), timeout=0.2)  # type: ignore[return-value]
        except OSError:  # a pipe was closed meanwhile
            return []

    def _read_message(self, number: int, pipe: Connection) -> Ready | Failed | CaptureState:
        """Read one message of a rank; the end of the pipe counts as Failed."""
        message: Ready | Failed | CaptureState
        try:
            message = self._decoder.decode(pipe.recv_bytes())
        except msgspec.MsgspecError as error:
            message = Failed(f"sent a message that cannot be read: {error}")
        except (EOFError, OSError):
            process = self._processes[number - 1]
            process.join(_REASON_SECONDS)
            message = Failed(f"ended with exit code {process.exitcode}")
        return message

    def _end(self) -> None:
        """Raise RankLost in the main thread by a signal; exit if the main thread has not closed the group in time."""
        if self._closing.is_set():
            return
        os.kill(os.getpid(), signal.SIGUSR1)
        if not self._closing.wait(_STUCK_SECONDS):
            print(f"specdecode-worker: {self._lost}", file=sys.stderr, flush=True)
            os._exit(1)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._closing.is_set():
            self._raise_if_lost()

    def _raise_if_lost(self) -> None:
        if self._lost:
            raise RankLost(self._lost)
