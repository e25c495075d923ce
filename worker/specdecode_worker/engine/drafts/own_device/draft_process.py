"""Draft process as the worker sees it: start, one message at a time, and its end for any reason."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe

import msgspec
from torch import Tensor

from specdecode_worker.bound_process import BoundProcess
from specdecode_worker.engine.drafts.own_device import draft_child
from specdecode_worker.engine.drafts.own_device.draft_child import BuildDraft
from specdecode_worker.engine.drafts.own_device.draft_messages import Done, Failed, FromDraft, Prefill, Propose, Ready
from specdecode_worker.engine.drafts.own_device.tensor_region import TensorRegion
from specdecode_worker.engine.errors import EngineError
from specdecode_worker.models.errors import ModelError

_EXIT_SECONDS = 1.0
"""Time to wait for the exit code of a process whose pipe is closed."""


class DraftLost(EngineError):
    """The draft process ended or does not answer; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Regions:
    """Shared memory for the tensors of messages and of their answers."""

    messages: TensorRegion
    answers: TensorRegion


class DraftProcess:
    """Process that holds one draft. Only one message is under way at a time."""

    def __init__(self, build: BuildDraft, regions: Regions, reply_seconds: float) -> None:
        """Start the process, which begins to load.

        Args:
            build: Loader of the draft, which must be picklable.
            regions: Shared memory, for one process at a time.
            reply_seconds: Time without an answer after which the process counts as hung.
        """
        self._pipe, child_end = Pipe()
        self._regions, self._reply_seconds, self._awaits_answer = regions, reply_seconds, False
        self._process = BoundProcess(
            draft_child.main, (build, regions.messages, regions.answers, child_end), "specdecode-draft"
        )
        self._process.start()
        child_end.close()
        self._decoder = msgspec.msgpack.Decoder(FromDraft)
        self._encoder = msgspec.msgpack.Encoder()
        self.started_seconds = time.monotonic()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    def wait_ready(self) -> Ready:
        """Wait until the draft is loaded. Raise ModelError if it cannot be."""
        try:
            answer = self._read(None)
        except DraftLost as error:
            raise ModelError(f"the draft process {error}") from None
        if isinstance(answer, Failed):
            raise ModelError(answer.reason)
        assert isinstance(answer, Ready), "it is the first message"
        return answer

    def send(self, message: Prefill | Propose, tensors: Sequence[Tensor]) -> None:
        """Send a message, after the answer to the one before. ``message.tensors`` is filled in here.

        Raises:
            DraftLost: The process ended or does not answer.
        """
        if self._awaits_answer:
            self.receive()  # the process still reads the tensors of the message before
        shapes = self._regions.messages.put(tensors)
        try:
            self._pipe.send_bytes(self._encoder.encode(msgspec.structs.replace(message, tensors=shapes)))
        except OSError:
            raise DraftLost(self._exit()) from None
        self._awaits_answer = True

    def receive(self) -> list[Tensor]:
        """Wait for the answer to the last message and return its tensors, which are valid until the next message.

        Raises:
            DraftLost: The process ended or does not answer.
        """
        answer = self._read(self._reply_seconds)
        self._awaits_answer = False
        if isinstance(answer, Failed):
            raise DraftLost(f"failed: {answer.reason}")
        assert isinstance(answer, Done), "nothing else answers a message"
        return self._regions.answers.get(answer.tensors)

    def kill(self) -> None:
        """End the process at once. It holds nothing that is worth an orderly end. May be called twice."""
        self._process.kill()
        self._pipe.close()

    def _read(self, seconds: float | None) -> FromDraft:
        try:
            if not self._pipe.poll(seconds):
                raise DraftLost(f"did not answer for {seconds:g} seconds")
            answer: FromDraft = self._decoder.decode(self._pipe.recv_bytes())
            return answer
        except (EOFError, OSError):
            raise DraftLost(self._exit()) from None

    def _exit(self) -> str:
        self._process.join(_EXIT_SECONDS)
        return f"ended with exit code {self._process.exitcode}"
