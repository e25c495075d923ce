"""A draft on a device of its own, as the engine sees it: its drafter, its process, and the restarts of that."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Pipe

import msgspec
import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.bound_process import BoundProcess
from specdecode_worker.contract import MAX_NODES, DraftConfig, DraftState
from specdecode_worker.core.device_state import STATE_RING_POSITIONS, DeviceState
from specdecode_worker.core.request import Request, Row
from specdecode_worker.drafts import own_device_process as draft_child
from specdecode_worker.drafts.base import (
    DEFAULT_DRAFT,
    Expand,
    LoadedDraft,
    PagedDrafter,
    StateColumns,
    catch_up_runs,
    no_ranks,
)
from specdecode_worker.drafts.draft_model import LONGEST_CATCH_UP, TextDrafter
from specdecode_worker.drafts.eagle import StateDrafter
from specdecode_worker.drafts.own_device_process import (
    BuildDraft,
    Chunk,
    DraftAnswer,
    DraftedRow,
    DraftFailed,
    DraftReady,
    FolderDraft,
    FromDraft,
    Place,
    Prefill,
    Propose,
    TensorRegion,
)
from specdecode_worker.drafts.registry import DraftLoader
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.sampling.sampler import Proposer
from specdecode_worker.sampling.trees import Forest

log = logging.getLogger(__name__)

# Draft process as the worker sees it: start, one message at a time, and its end for any reason.

_EXIT_SECONDS = 1.0
"""Time to wait for the exit code of a process whose pipe is closed."""


class DraftLost(Exception):
    """The draft process ended or does not answer; the message gives the reason."""


class DraftProcess:
    """Process that holds one draft. Only one message is under way at a time."""

    def __init__(self, build: BuildDraft, messages: TensorRegion, answers: TensorRegion, reply_seconds: float) -> None:
        """Start the process, which begins to load.

        Args:
            build: Loader of the draft, which must be picklable.
            messages: Shared memory for the tensors of messages, of one process at a time.
            answers: The same for those of their answers.
            reply_seconds: Time without an answer after which the process counts as hung.
        """
        self._pipe, child_end = Pipe()
        self._messages, self._answers = messages, answers
        self._reply_seconds, self._awaits_answer = reply_seconds, False
        self._process = BoundProcess(draft_child.main, (build, messages, answers, child_end), "specdecode-draft")
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

    def wait_ready(self) -> DraftReady:
        """Wait until the draft is loaded. Raise ModelError if it cannot be."""
        try:
            answer = self._read(None)
        except DraftLost as error:
            raise ModelError(f"the draft process {error}") from None
        if isinstance(answer, DraftFailed):
            raise ModelError(answer.reason)
        assert isinstance(answer, DraftReady), "it is the first message"
        return answer

    def send(self, message: Prefill | Propose, tensors: Sequence[Tensor]) -> None:
        """Send a message, after the answer to the one before. ``message.tensors`` is filled in here.

        Raises:
            DraftLost: The process ended or does not answer.
        """
        if self._awaits_answer:
            self.receive()  # the process still reads the tensors of the message before
        shapes = self._messages.put(tensors)
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
        if isinstance(answer, DraftFailed):
            raise DraftLost(f"failed: {answer.reason}")
        assert isinstance(answer, DraftAnswer), "nothing else answers a message"
        return self._answers.get(answer.tensors)

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


# Supervisor of a draft process: a lost process costs the proposals of one step, and is started again with back-off.
#
# The engine thread sends messages. A thread restarts a lost process; the engine thread takes the new one over between
# two steps, because the keys of all requests are gone with the old one.

FIRST_DELAY_SECONDS = 1.0
"""Time from the loss of a process to the start of the next one."""
LONGEST_DELAY_SECONDS = 60.0
"""Bound of that time, which doubles with every loss. A process that lived for longer resets it."""


class ProcessSupervisor:
    """Owner of the process of one draft. All methods but ``close`` are for the engine thread."""

    def __init__(
        self, process: DraftProcess, start: Callable[[], DraftProcess], first_delay: float = FIRST_DELAY_SECONDS
    ) -> None:
        """Take over a process that is ready.

        Args:
            process: The process.
            start: Function that starts another one, which begins to load.
            first_delay: Time from the first loss to the restart, in seconds.
        """
        self._process: DraftProcess | None = process
        self._start, self._delay, self._first_delay = start, first_delay, first_delay
        self._restarted: DraftProcess | None = None
        self._starting: DraftProcess | None = None
        self._closing, self._lock = threading.Event(), threading.Lock()
        self.problem = ""
        """Reason why no process can be used now; empty if one can."""

    @property
    def usable(self) -> bool:
        """True if a process can be asked."""
        return self._process is not None

    def send(self, message: Prefill | Propose, tensors: Sequence[Tensor]) -> None:
        """Send a message without waiting for its answer. It is dropped if there is no process."""
        if self._process is not None:
            try:
                self._process.send(message, tensors)
            except DraftLost as error:
                self._lose(self._process, str(error))

    def ask(self, message: Propose, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send a message and return the tensors of its answer; none if there is no process or if it is lost."""
        self.send(message, tensors)
        if self._process is not None:
            try:
                return self._process.receive()
            except DraftLost as error:
                self._lose(self._process, str(error))
        return []

    def take_restarted(self) -> bool:
        """Begin to use a restarted process, if there is one, and return whether there was. Its cache is empty."""
        with self._lock:
            process, self._restarted = self._restarted, None
        if process is None:
            return False
        self._process, self.problem = process, ""
        log.info("the draft process is back, with process id %d", process.pid)
        return True

    def close(self) -> None:
        """End the process and do not start another one. May be called twice, from any thread."""
        self._closing.set()
        with self._lock:
            for process in (self._process, self._restarted, self._starting):
                if process is not None:
                    process.kill()

    def _lose(self, process: DraftProcess, reason: str) -> None:
        process.kill()
        self._process = None
        if time.monotonic() - process.started_seconds > LONGEST_DELAY_SECONDS:
            self._delay = self._first_delay
        self._report(f"the draft process {reason}")
        threading.Thread(target=self._restart, name="draft-restart", daemon=True).start()

    def _report(self, problem: str) -> None:
        self.problem = f"{problem}; requests decode plainly, and it starts again in {self._delay:g} seconds"
        log.warning("%s", self.problem)

    def _restart(self) -> None:
        """Start processes, in a thread, until one is ready."""
        while not self._closing.wait(self._delay):
            self._delay = min(2 * self._delay, LONGEST_DELAY_SECONDS)
            process = None
            try:
                with self._lock:
                    if self._closing.is_set():
                        return
                    process = self._starting = self._start()
                process.wait_ready()
            except (ModelError, OSError) as error:
                with self._lock:
                    self._starting = None
                if process is not None:
                    process.kill()
                if not self._closing.is_set():
                    self._report(str(error))
                continue
            with self._lock:
                self._restarted, self._starting = process, None
            return


# Drafters whose networks run in a draft process. They count what the draft has processed, as local drafters do.
#
# The draft runs over prompts while the target computes its next step: nothing waits for the answer to a Prefill
# message. The tokens of trees are needed at once.


class OwnDrafter(PagedDrafter):
    """Drafter in a draft process. Its passes run before a graph that verifies, never in one."""

    own_process = True
    _state: DeviceState

    def __init__(
        self, supervisor: ProcessSupervisor, reads: TargetStates, last_position: int, state: DeviceState
    ) -> None:
        """Create a drafter for a draft of these facts, in the process of this supervisor."""
        self._supervisor = supervisor
        self.reads, self.columns, self._state = reads, StateColumns(), state
        self.first_slot, self.last_position = int(bool(reads)), last_position

    def ready(self, request: Request) -> bool:
        """Return whether there is a draft process, and the draft can propose for the request."""
        return self._supervisor.usable and super().ready(request)  # type: ignore[safe-super]

    @property
    def problem(self) -> str:
        """Reason why the draft process cannot be used now; empty if it can."""
        return self._supervisor.problem

    def take_restarted(self) -> bool:
        """Begin to use a restarted process and return whether there was one. It has no keys of any request."""
        return self._supervisor.take_restarted()

    def prefill(self, rows: Sequence[Row], aux_TA: Tensor) -> None:
        """Let the draft run over prefill chunks. Returns before it has."""
        if self._supervisor.usable:
            self._supervisor.send(Prefill(tuple(map(_chunk, rows)), ()), self._prefill_tensors(rows, aux_TA))
        self.record_prefill(rows)

    def begin(self, rows: Sequence[Row], forest: Forest, sampler: Proposer) -> Expand | None:
        """Draft the whole trees in the draft process, with the noise that the target chooses with."""
        drafting, counts = self.start_catch_up(rows, forest.trees)
        if not drafting:
            return None
        ranked_BNK = self._ask(rows, forest, drafting, counts)
        return lambda _, level: ranked_BNK[level.batch_R, level.node_R]

    def _ask(self, rows: Sequence[Row], forest: Forest, drafting: list[int], counts: list[int]) -> Tensor:
        """Return the ranked tokens behind every node [B, N, K], -1 where the process has none or is lost."""
        ranked_BNK = no_ranks(forest, self._device)
        if not self._supervisor.usable:
            return ranked_BNK
        trees = [
            DraftedRow(
                place=_place(rows[b].request),
                count=count,
                parents=forest.trees[b].parents if forest.trees[b].drafted_depth else (-1,),
                params=msgspec.structs.replace(rows[b].request.sampling_params, grammar=""),
            )
            for b, count in zip(drafting, counts, strict=True)
        ]
        counting = tuple(i for i, tree in enumerate(trees) if tree.params.counts)
        message = Propose(tuple(trees), counting, ())
        tensors = self._tree_tensors([rows[b].request for b in drafting], counts, counting)
        if not forest.levels:
            self._supervisor.send(message, tensors)
        elif answer := self._supervisor.ask(message, tensors):
            mine_BNK = answer[0].to(self._device)
            ranked_BNK[to_device(drafting, self._device), : mine_BNK.shape[1]] = mine_BNK
        return ranked_BNK

    def _prefill_tensors(self, rows: Sequence[Row], aux_TA: Tensor) -> list[Tensor]:
        """Return the tensors of a Prefill message."""
        tokens = [self._state.tokens_SP[row.request.slot, row.start : row.start + row.count] for row in rows]
        if not self.reads:
            return [torch.cat(tokens)]
        slots_B = to_device([row.request.slot for row in rows], self._device)
        before_B = to_device([max(row.start - 1, 0) for row in rows], self._device)
        before_BA = self._state.aux(slots_B, before_B)
        return [torch.cat(tokens), self.columns.of(aux_TA), self.columns.of(before_BA)]

    def _tree_tensors(
        self, requests: Sequence[Request], counts: Sequence[int], counting: Sequence[int]
    ) -> list[Tensor]:
        """Return the tensors of a Propose message."""
        state = self._state
        _, index_T, slots_T = catch_up_runs(state, requests, counts)
        slots_B = to_device([request.slot for request in requests], self._device)
        tensors = [state.length_S[slots_B], state.tokens_SP[slots_T, index_T]]
        if self.reads:
            tensors.append(self.columns.of(state.aux(slots_T, index_T - 1)))
        texts = [requests[i] for i in counting]
        return tensors + [state.tokens_SP[one.slot, : 1 + max(one.cached_bound, one.prefilled)] for one in texts]

    @property
    def _device(self) -> torch.device:
        return self._state.length_S.device


class OwnStateDrafter(OwnDrafter, StateDrafter):
    """Drafter of the methods eagle3 and eagle in a draft process."""


class OwnModelDrafter(OwnDrafter, TextDrafter):
    """Drafter of the method draft-model in a draft process."""


def _place(request: Request) -> Place:
    return Place(request.slot, tuple(request.blocks), request.draft.start)


def _chunk(row: Row) -> Chunk:
    request = row.request
    return Chunk(_place(request), row.start, row.count, request.cached_bound, request.prefilled)


# Loader of drafts by their placement: on the device of the target, or in a draft process on a device of its own.

_SPARE_BYTES = 1 << 16
"""Bytes of a region for the small tensors of a message and the alignment of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedDraftLoader:
    """``LoadDraft`` for drafts of either placement."""

    local: DraftLoader
    """Loader of drafts on the device of the target. It knows the target, its folder and the size of the caches."""
    device: torch.device
    """Device of the drafts that run in processes of their own."""
    threads: int
    """Number of torch threads of a draft process."""
    max_num_batched_tokens: int
    """Most tokens of prompts in one step."""
    reply_seconds: float
    """Time without an answer after which a draft process counts as hung."""

    def __call__(self, config: DraftConfig, name: str = DEFAULT_DRAFT) -> LoadedDraft:
        """Load a draft. Raise ModelError if it cannot be loaded or if its device is missing.

        One in a process of its own is loaded once that process is ready.
        """
        local = self.local
        if config.placement == "shared":
            return local(config, name)
        assert config.uri is not None, "the contract allows no other method"
        seen = torch.cuda.device_count()
        if self.device.type == "cuda" and seen <= (self.device.index or 0):
            raise ModelError(
                f"draft.placement own needs a GPU beside the target's, and torch sees {seen} here; "
                "request one more, or set placement shared"
            )
        build = FolderDraft(
            config=config.model_copy(update={"placement": "shared", "uri": str(local.resolve(config.uri))}),
            name=name,
            target_folder=local.target_folder,
            max_model_len=local.max_model_len,
            dtype=local.state.dtype,
            device=self.device,
            slots=local.state.padding_slot,
            blocks=local.blocks,
            threads=self.threads,
        )
        widest = local.target.config.hidden_size * (local.target.config.num_hidden_layers + 2)
        regions = message_regions(local.state, self.max_num_batched_tokens, widest)
        start = partial(DraftProcess, build, *regions, self.reply_seconds)
        process = start()
        try:
            ready = process.wait_ready()
        except BaseException:
            process.kill()
            raise
        supervisor = ProcessSupervisor(process, start)
        drafter = drafter_of(ready, supervisor, local.state)
        # A draft is replaced, or loaded and never used, without further notice.
        weakref.finalize(drafter, supervisor.close)
        described = DraftState.model_validate_json(ready.state_json)  # by its local folder
        return LoadedDraft(drafter, described.model_copy(update={"uri": config.uri}))

    def leaves_memory_of_target(self, config: DraftConfig) -> bool:
        """Return whether a draft takes no memory of the target's device."""
        return config.placement == "own" and self.device != self.local.state.length_S.device


def drafter_of(ready: DraftReady, supervisor: ProcessSupervisor, state: DeviceState) -> OwnDrafter:
    """Return the drafter for the draft of a process."""
    kind = OwnStateDrafter if ready.reads else OwnModelDrafter
    return kind(supervisor, ready.reads, ready.last_position, state)


def message_regions(state: DeviceState, max_tokens: int, widest: int) -> tuple[TensorRegion, TensorRegion]:
    """Return the regions of the largest messages and of their answers. Memory that is never written is never taken.

    Args:
        state: Device state of the running requests.
        max_tokens: Most tokens of prompts in one step.
        widest: Largest width of the target states that a draft could read.
    """
    slots, positions = state.tokens_SP.shape
    tokens = max(positions + max_tokens, slots * max(STATE_RING_POSITIONS, LONGEST_CATCH_UP))
    texts, states = 8 * (slots * positions + tokens), (tokens + slots) * widest * state.dtype.itemsize
    ranked = 8 * slots * (MAX_NODES + 1) * 8
    return TensorRegion(texts + states + _SPARE_BYTES), TensorRegion(ranked + _SPARE_BYTES)
