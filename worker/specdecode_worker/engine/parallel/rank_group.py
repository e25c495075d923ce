"""Rank 0's hold on the other ranks: starts them, tells them what to do, and ends when one of them does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from types import FrameType

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from specdecode_worker.engine.errors import RankLost
from specdecode_worker.engine.parallel import rank_process
from specdecode_worker.engine.parallel.rank_messages import Assignment, Failed, Keep, Logits, Ready, Told, announced
from specdecode_worker.engine.step.packed_batch import Packed
from specdecode_worker.models.networks.llama import Llama

_STUCK_SECONDS = 10.0
"""A collective whose peer died may never return (NCCL); then the process ends without ado."""
_WORDS_SECONDS = 1.0
"""How long a broken collective waits for the word why."""


class Group:
    """All ranks of a replica but rank 0, which is who holds this. One at a time in a process."""

    def __init__(self, whole: Assignment) -> None:
        """Starts loading in the other ranks; ``whole`` is rank 0's own assignment, its meeting still empty."""
        self._folder = tempfile.mkdtemp(prefix="specdecode-ranks-")
        self._own = msgspec.structs.replace(whole, meeting=f"file://{self._folder}/store")
        self._encoder = msgspec.msgpack.Encoder()
        self._pipes: list[Connection] = []
        self._processes = [self._start(number) for number in range(1, whole.size)]
        self._loaded, self._closing, self._lost = threading.Event(), threading.Event(), ""
        # Ranks end when their pipe does; multiprocessing would wait for them before it closed any.
        self._finalizer = Finalize(self, self.close, exitpriority=10)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._interrupt)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def load(self) -> tuple[Llama, torch.device]:
        """Rank 0's own part of the target, once all have theirs. Raises ModelError, RankLost."""
        try:
            with self.together():
                found = rank_process.load_part(self._own)
                while not self._loaded.wait(_WORDS_SECONDS):
                    self._complain()
        except BaseException:
            self.close()
            raise
        return found

    def forward(self, packed: Packed, logit_rows_R: Tensor) -> None:
        """The others run this pass too, from now on until its logits are gathered."""
        self._tell(*announced(packed, logit_rows_R))

    def keep(self, source_slots: Tensor, target_slots: Tensor) -> None:
        self._tell(Keep(len(source_slots)), torch.stack((source_slots, target_slots)))

    def logits(self, hidden_RE: Tensor) -> None:
        self._tell(Logits(len(hidden_RE)), hidden_RE)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What all ranks do at once: when it breaks, the rank that broke it is named. Raises RankLost."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            deadline = time.monotonic() + _WORDS_SECONDS
            while not self._lost and time.monotonic() < deadline:
                time.sleep(0.01)
            self._complain()
            raise error

    def close(self) -> None:
        """Ends the other ranks. May be called twice."""
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

    def _start(self, number: int) -> SpawnProcess:
        spawn = multiprocessing.get_context("spawn")  # CUDA cannot be used after a fork
        near, far = spawn.Pipe()
        assignment = self._encoder.encode(msgspec.structs.replace(self._own, rank=number))
        process = spawn.Process(
            target=rank_process.main, args=(assignment, far), name=f"specdecode-rank-{number}", daemon=True
        )
        process.start()
        far.close()
        self._pipes.append(near)
        return process

    def _tell(self, message: Told, data: Tensor) -> None:
        with self.together():
            told = self._encoder.encode(message)
            for pipe in self._pipes:
                pipe.send_bytes(told)
            dist.broadcast(data.contiguous(), src=0)

    def _watch(self) -> None:
        """Hears the ranks out, in a thread. One that ends takes the replica with it, also while nothing runs."""
        silent = {pipe: number for number, pipe in enumerate(self._pipes, start=1)}
        while silent and not self._lost:
            for pipe in self._heard(silent):
                self._hear(silent.pop(pipe), pipe)
            if self._closing.is_set():
                return
        if not self._lost:
            self._loaded.set()
            sentinels = [process.sentinel for process in self._processes]
            number = 1 + sentinels.index(wait(sentinels)[0])  # type: ignore[arg-type]
            self._hear(number, self._pipes[number - 1])
        self._end()

    @staticmethod
    def _heard(pipes: Iterable[Connection]) -> list[Connection]:
        try:
            return wait(list(pipes), timeout=0.2)  # type: ignore[return-value]
        except OSError:  # closed meanwhile
            return []

    def _hear(self, number: int, pipe: Connection) -> None:
        """One message; the end of the pipe is one too."""
        answer: Ready | Failed
        try:
            answer = msgspec.msgpack.decode(pipe.recv_bytes(), type=Ready | Failed)
        except (EOFError, OSError):
            process = self._processes[number - 1]
            process.join(_WORDS_SECONDS)
            answer = Failed(f"ended with exit code {process.exitcode}")
        if isinstance(answer, Failed):
            self._lost = f"rank {number}: {answer.reason}"

    def _end(self) -> None:
        """The main thread gets RankLost wherever it is; where it cannot, the process ends."""
        if self._closing.is_set():
            return
        os.kill(os.getpid(), signal.SIGUSR1)
        if not self._closing.wait(_STUCK_SECONDS):
            print(f"specdecode-worker: {self._lost}", file=sys.stderr, flush=True)
            os._exit(1)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._closing.is_set():
            self._complain()

    def _complain(self) -> None:
        if self._lost:
            raise RankLost(self._lost)
