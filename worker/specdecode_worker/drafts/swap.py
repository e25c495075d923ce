"""Changes of drafts while requests run: the assignment of the plan, the trial of a candidate, and the swap."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pydantic import ValidationError

from specdecode_worker.contract import (
    MAX_TASKS,
    Artifact,
    DraftAssignment,
    DraftConfig,
    DraftState,
    DraftTrial,
    Env,
    PendingDraft,
    Plan,
    TrialCost,
    TrialPair,
    TrialState,
    WorkerConfig,
    candidate_first,
)
from specdecode_worker.core.errors import is_sticky_device_error
from specdecode_worker.core.messages import SetDraft
from specdecode_worker.drafts.draft_files import draft_hash
from specdecode_worker.models.errors import ModelError

if TYPE_CHECKING:
    from specdecode_worker.drafts.base import LoadDraft, LoadedDraft

log = logging.getLogger(__name__)

# Costs of one block of a draft trial, by task and load bucket. See contract.TrialCost.

MAX_CELLS = 48
"""Most cells of a reported pair. With it a pair takes at most about 9 KiB of the report."""


class CostCell(NamedTuple):
    """Task, and the plan's bucket indices of concurrency and context."""

    task: str
    concurrency: int
    context: int


@dataclass(slots=True)
class CellSums:
    """Sums over the steps of one cell: duration times decoding sequences in seconds, and emitted tokens."""

    sequence_seconds: float = 0.0
    tokens: int = 0


BlockCells = Mapping[CostCell, CellSums]


class BlockCosts:
    """Accumulator of one block: the requests that were admitted in it, and what their decoding steps cost.

    Requests that ran before the block began are never members, so they neither cost nor count.
    """

    def __init__(self, requests: int) -> None:
        """Start an empty block that is complete after ``requests`` of its members have finished."""
        self._left = requests
        self._members: set[str] = set()
        self._rows: list[tuple[str, int]] = []
        self.cells: dict[CostCell, CellSums] = {}
        """Costs so far."""

    @property
    def is_complete(self) -> bool:
        """True once enough members have finished."""
        return self._left <= 0

    def admit(self, request_id: str) -> None:
        """Make a request that starts to run a member of this block."""
        self._members.add(request_id)

    def add_row(self, request_id: str, task: str, tokens: int) -> None:
        """Add a decoding request of the step that is being collected, with the tokens that it emitted."""
        if request_id in self._members:
            self._rows.append((task, tokens))

    def end_step(self, concurrency: int, context: int, seconds: float) -> None:
        """Attribute the duration of a step to the rows added since the last one."""
        for task, tokens in self._rows:
            sums = self.cells.setdefault(CostCell(task, concurrency, context), CellSums())
            sums.sequence_seconds += seconds
            sums.tokens += tokens
        self._rows.clear()

    def end_request(self, request_id: str, *, emitted: bool) -> None:
        """Remove a request that ends for any reason. A member that emitted a token counts as finished.

        Cancelled requests count too, because the server cancels a request at its stop string.
        """
        if request_id in self._members:
            self._members.remove(request_id)
            self._left -= emitted


def pair_of(index: int, incumbent: BlockCells, candidate: BlockCells) -> TrialPair:
    """Return the costs of a finished pair for the report.

    Beyond MAX_CELLS, cells that weigh least in the comparison are left out on both sides. The weight is symmetric in
    the two blocks, so that the selection favours neither.
    """

    def weight(cell: CostCell) -> tuple[float, int]:
        one, other = (block[cell].tokens if cell in block else 0 for block in (incumbent, candidate))
        return one * other / max(one + other, 1), one + other

    reported = sorted(sorted({*incumbent, *candidate}), key=weight, reverse=True)[:MAX_CELLS]
    sides = (tuple(_cost(cell, block[cell]) for cell in reported if cell in block) for block in (incumbent, candidate))
    return TrialPair(index=index, incumbent=next(sides), candidate=next(sides))


def _cost(cell: CostCell, sums: CellSums) -> TrialCost:
    """Return the reported form of a cell, rounded to keep the report small."""
    return TrialCost(**cell._asdict(), sequence_seconds=float(f"{sums.sequence_seconds:.6g}"), tokens=sums.tokens)


# Messages about drafts that cannot be loaded: one sentence that names the file or tensor and the remedy.
#
# The server process imports this module, so it must not import torch.

MAX_CHARACTERS = 500
"""Longest message. The report holds one for each draft and has a limit of its own."""
_NO_DRAFT_FAILURE = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that end the process or thread and say nothing about the draft."""
_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")
"""Names of torch's and Python's exceptions for too little memory."""


def describe_failure(error: BaseException, draft: str) -> str:
    """Return the reason why a draft could not be loaded.

    The traceback of an unexpected error is logged. Rust libraries raise panics that are not an Exception, so the caller
    passes every BaseException.

    Args:
        error: Error of the attempt.
        draft: URI of the draft, or its method if it has none.

    Raises:
        BaseException: ``error`` itself, if it says nothing about the draft: the process is to end, or the device does
            not work any more.
    """
    if isinstance(error, _NO_DRAFT_FAILURE) or is_sticky_device_error(error):
        raise error
    return _one_line(_message(error, draft))


def _message(error: BaseException, draft: str) -> str:
    if isinstance(error, ModelError):
        return str(error)
    if isinstance(error, ValidationError):
        return "; ".join(str(one["msg"]) for one in error.errors(include_url=False, include_context=False))
    if _is_out_of_memory(error):
        return (
            f"{draft}: there is too little memory to load the draft; give the worker more memory, lower "
            f"kv_cache_tokens, or take a smaller or quantised draft ({_first_line(error)})"
        )
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return (
            f"{draft} is not complete in the model cache, which is read-only here ({error.filename}); fetch it with "
            "`specdecode-worker pull` where the cache can be written"
        )
    if isinstance(error, OSError):
        return (
            f"{error.filename or draft} cannot be read: {error.strerror or error}; put a file there that the worker's "
            "user may read, or name another draft"
        )
    log.warning("unexpected error while the draft %s was loaded", draft, exc_info=error)
    return (
        f"{draft} cannot be loaded ({type(error).__name__}: {_first_line(error)}); export the draft again, or report "
        "this with the traceback in the worker's log"
    )


def _is_out_of_memory(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    # The CPU allocator of torch raises a plain RuntimeError.
    return bool(names.intersection(_OUT_OF_MEMORY)) or "can't allocate memory" in str(error)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_CHARACTERS else line[: MAX_CHARACTERS - 3] + "..."


# Draft that a worker should run according to its plan and its config.
#
# The server process imports this module, so it must not import torch.


@dataclass(frozen=True, slots=True)
class DraftGoal:
    """Draft that should run. ``hash`` is empty for the draft of the worker's config, which may have any hash."""

    config: DraftConfig
    hash: str = ""

    def is_met(self, running: DraftState) -> bool:
        """Return whether the running draft is this one. A config without a draft is met by any."""
        if self.hash:
            return running.hash == self.hash
        if self.config.method == "none":
            return True
        return bool(running.hash) and (running.method, running.uri) == (self.config.method, self.config.uri or "")


def worker_name() -> str:
    """Return the name of this worker in reports: that of its pod, else of its host."""
    return os.environ.get(Env.pod_name) or socket.gethostname()


def followed_assignment(plan: Plan, config: WorkerConfig) -> DraftAssignment | None:
    """Return the assignment of a plan; None if it has none, or one for another spec draft or target."""
    assignment = plan.assignment
    own = (config.draft.uri or "", config.model.target)
    return assignment if assignment is not None and (assignment.spec_draft, assignment.target) == own else None


def trial_of(assignment: DraftAssignment, worker: str) -> DraftTrial | None:
    """Return the trial that this worker has to run, or None."""
    trial = assignment.trial
    return trial if trial is not None and trial.pod == worker else None


def stable_goal(assignment: DraftAssignment, config: WorkerConfig) -> DraftGoal:
    """Return the goal of an assignment apart from its trial."""
    stable = assignment.stable
    return DraftGoal(config.draft) if stable is None else DraftGoal(artifact_config(stable, config), stable.hash)


def assigned_uris(plan: Plan, config: WorkerConfig, worker: str) -> tuple[str, ...]:
    """Return the URIs of the artefacts that a plan assigns to this worker: the stable draft and its candidate."""
    assignment = followed_assignment(plan, config)
    if assignment is None:
        return ()
    trial = trial_of(assignment, worker)
    artifacts = (assignment.stable, None if trial is None else trial.candidate)
    return tuple(artifact.uri for artifact in artifacts if artifact is not None)


def artifact_config(artifact: Artifact, config: WorkerConfig) -> DraftConfig:
    """Return the configuration of an artefact: an EAGLE-3 head, quantised and placed as the draft of the config is.

    An artefact at the URI of the config's draft is loaded as that draft.
    """
    if artifact.uri == config.draft.uri:
        return config.draft.model_copy(update={"required": False})
    quantization = config.draft.quantization if config.draft.method == "eagle3" else None
    placement = config.draft.placement
    return DraftConfig(method="eagle3", uri=artifact.uri, quantization=quantization, placement=placement)


def start_draft(config: WorkerConfig, plan: Plan | None, resolve: Callable[[str], Path]) -> tuple[WorkerConfig, str]:
    """Return the config to start a worker with, and the reason why the assigned draft is not in it; empty without one.

    The config is unchanged if the artefact is absent or another one.
    """
    assignment = None if plan is None else followed_assignment(plan, config)
    if assignment is None or not (goal := stable_goal(assignment, config)).hash:
        return config, ""
    uri = goal.config.uri or ""
    try:
        actual = draft_hash(goal.config, resolve)
    except BaseException as error:  # a panic of a Rust library is not an Exception
        return config, describe_failure(error, uri)
    if actual != goal.hash:
        return config, f"{uri} has the hash {actual}, and the plan assigns the draft with hash {goal.hash}"
    return config.model_copy(update={"draft": goal.config}), ""


# Attempts to reach the assigned draft, with a back-off after failures. This module reads no clock.

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 5.0, 300.0
"""Wait after the first failure, doubled after each further one, and its limit. A claim may be mounted late."""


@dataclass(slots=True)
class Convergence:
    """Draft to reach, or None once it runs or a person has chosen another draft."""

    goal: DraftGoal | None = None
    failures: int = 0
    due_seconds: float = 0.0
    """Time of the next attempt."""

    def aim(self, goal: DraftGoal, now: float) -> None:
        """Set the goal. The same goal again does not shorten the wait after a failure."""
        if goal != self.goal:
            self.goal, self.failures, self.due_seconds = goal, 0, now

    def clear(self) -> None:
        """Give up the goal, reached or not."""
        self.goal = None

    def is_due(self, now: float) -> bool:
        """Return whether an attempt has to be made."""
        return self.goal is not None and now >= self.due_seconds

    def record_failure(self, now: float) -> None:
        """Schedule the next attempt."""
        self.due_seconds = now + min(FIRST_RETRY_SECONDS * 2.0**self.failures, MAX_RETRY_SECONDS)
        self.failures = min(self.failures + 1, 30)


# Draft swaps: loading of a new draft in a thread while the engine runs steps.
#
# The engine loop calls `DraftSwapQueue.finished` between two steps and passes the loaded drafts to the engine. A draft
# that cannot be loaded, for any reason, changes nothing; `DraftSwapQueue.status` keeps the reason for the report.

POLL_SECONDS = 0.05
"""Interval at which an idle engine loop checks for a loaded draft, in seconds."""
MAX_DRAFTS = MAX_TASKS
"""Most drafts of a worker, the default draft included; tasks choose among them. It bounds the report."""


@dataclass(frozen=True, slots=True)
class DraftSwap:
    """Finished swap of the draft called ``name``. ``loaded`` is None on failure; ``problem`` is the reason."""

    name: str
    loaded: LoadedDraft | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SwapStatus:
    """Swap of one draft for the report: the draft that is loading, and the reason why the last swap failed."""

    pending: PendingDraft | None = None
    problem: str | None = None


class DraftSwapQueue:
    """Queue of draft swaps, at most one for each name of a draft.

    One thread loads the drafts one by one, without effect on drafts in use. A new request for a name replaces the
    pending one of that name: if its draft is not loading yet it is never loaded, and otherwise the loaded draft is
    discarded.
    """

    def __init__(self, load: LoadDraft | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._load, self._clock = load, clock
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="draft")
        self._swaps: dict[str, tuple[PendingDraft, Future[DraftSwap]]] = {}
        self._problems: dict[str, str] = {}

    @property
    def pending(self) -> bool:
        """True if a draft is loading or waits to be taken over."""
        return bool(self._swaps)

    def status(self) -> Mapping[str, SwapStatus]:
        """Return the swaps that are pending or failed last, by the name of the draft."""
        pending = {name: SwapStatus(pending=draft) for name, (draft, _) in self._swaps.items()}
        return {name: SwapStatus(problem=problem) for name, problem in self._problems.items()} | pending

    def pending_draft(self, name: str) -> PendingDraft | None:
        """Return the draft that is loading to replace the one of this name, or None."""
        return self._swaps[name][0] if name in self._swaps else None

    def cancel(self, name: str) -> None:
        """Discard the pending swap of this name, if there is one."""
        if (cancelled := self._swaps.pop(name, None)) is not None:
            cancelled[1].cancel()

    def begin(self, message: SetDraft, in_use: Collection[str] = ()) -> None:
        """Start or queue the loading of a draft.

        Args:
            message: The draft, and the name of the draft that it replaces.
            in_use: Names of the drafts that the worker has.

        Raises:
            ModelError: The swap cannot be tried; nothing has changed.
        """
        config = _config_of(message)
        if self._load is None:
            raise ModelError("this engine cannot load a draft while it runs")
        self._make_room(message.name, in_use)
        pending = PendingDraft(
            method=config.method,
            hash=message.expected_hash,
            uri=config.uri or "",
            quantization=config.quantization,
            since_seconds=self._clock(),
        )
        self.cancel(message.name)
        self._problems.pop(message.name, None)
        future = self._worker.submit(_attempt, self._load, config, message.name, message.expected_hash)
        self._swaps[message.name] = pending, future

    def finished(self) -> Iterator[DraftSwap]:
        """Yield the finished swaps in the order of their requests.

        Raises:
            BaseException: The device does not work any more; see `describe_failure`.
        """
        for name, (_, future) in list(self._swaps.items()):
            if not future.done():
                return
            del self._swaps[name]
            swap = future.result()
            if swap.loaded is None:
                self.record_problem(name, swap.problem)
            yield swap

    def record_problem(self, name: str, problem: str) -> None:
        """Record why the last swap of this draft failed, also if it failed only when the engine took it over."""
        log.warning("the draft %r is not replaced: %s", name or "default", problem)
        self._problems[name] = problem

    def close(self) -> None:
        """Cancel queued swaps, without waiting for the one that is loading."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _make_room(self, name: str, in_use: Collection[str]) -> None:
        """Forget problems of drafts that never ran, oldest first, so that at most MAX_DRAFTS names remain."""
        taken = {"", name, *in_use, *self._swaps}
        if len(taken) > MAX_DRAFTS:
            raise ModelError(f"a worker has at most {MAX_DRAFTS} drafts; replace one of {', '.join(sorted(in_use))}")
        for other in [other for other in self._problems if other not in taken]:
            if len(taken | self._problems.keys()) > MAX_DRAFTS:
                del self._problems[other]


def _config_of(message: SetDraft) -> DraftConfig:
    try:
        config = DraftConfig.model_validate_json(message.draft_json)
    except ValidationError as error:
        raise ModelError("; ".join(one["msg"] for one in error.errors(include_url=False))) from None
    if config.method == "none":
        raise ModelError("method none is no draft; to stop speculating, send a plan without depth")
    return config


def _attempt(load: LoadDraft, config: DraftConfig, name: str, expected_hash: str) -> DraftSwap:
    """Load a draft. The result holds the failure as text, because an exception would keep tensors of the attempt."""
    try:
        loaded = load(config, name)
        loaded_hash = loaded.state.hash
        if expected_hash not in ("", loaded_hash):
            raise ModelError(
                f"{config.uri} has the hash {loaded_hash} and not {expected_hash}, the expected one: its files are "
                "another draft's, or its files changed while they were read; check them and ask again"
            )
        return DraftSwap(name, loaded)
    except BaseException as error:  # a panic of a Rust library is not an Exception
        return DraftSwap(name, None, describe_failure(error, config.uri or config.method))


# Engine as the follower of the assignment sees it.

_NAME = ""
"""Name of the default draft, which the follower replaces."""


class FollowedEngine(Protocol):
    """Part of an engine that the follower needs."""

    @property
    def draft(self) -> DraftState:
        """State of the default draft."""
        ...

    def loaded_draft(self) -> LoadedDraft | None:
        """Return the default draft, or None if it is not loaded."""
        ...

    def set_block(self, block: BlockCosts | None) -> None:
        """Begin a block of a trial; None ends the trial."""
        ...


# Trial of a candidate on one worker: its two drafts, which of them runs in which block, and the finished pairs.

MAX_PAIRS = 16
"""Most finished pairs in the report. The operator reads reports far more often than pairs finish."""
MAX_PAIRS_BYTES = 16 * 1024
"""Most bytes of the finished pairs in the report, a quarter of it. The newest pair is reported in any case."""


class TrialRun:
    """Trial that this worker was assigned, until the plan assigns it another one or none.

    Each pair has two blocks, one for each draft, in the order that `candidate_first` says.
    """

    def __init__(self, trial: DraftTrial, stable: DraftGoal) -> None:
        """Start before the first block, with no draft loaded. ``stable`` runs before and after the trial."""
        self.trial = trial
        """The trial. It may be replaced between two blocks by one with the same id and candidate."""
        self.stable = stable
        self.pair = trial.first_pair
        """Index of the pair that runs."""
        self.incumbent: LoadedDraft | None = None
        self.candidate: LoadedDraft | None = None
        self.block: BlockCosts | None = None
        """Block that runs; None before the first one, and once the trial has failed."""
        self.problem = ""
        """Reason why the trial has failed; empty if it has not."""
        self._first_block: BlockCells | None = None
        self._pairs: deque[TrialPair] = deque(maxlen=MAX_PAIRS)

    def is_same(self, trial: DraftTrial | None, stable: DraftGoal) -> bool:
        """Return whether an assignment goes on with this trial."""
        own = self.trial
        return trial is not None and (trial.id, trial.candidate, stable) == (own.id, own.candidate, self.stable)

    @property
    def is_loading(self) -> bool:
        """True until the first block begins."""
        return self.block is None and not self.problem

    @property
    def is_between_pairs(self) -> bool:
        """True before the first block of a pair."""
        return self._first_block is None

    @property
    def is_candidates_turn(self) -> bool:
        """True if the next or running block belongs to the candidate."""
        return candidate_first(self.trial.id, self.pair) == self.is_between_pairs

    @property
    def next_draft(self) -> LoadedDraft:
        """Draft of the next or running block."""
        draft = self.candidate if self.is_candidates_turn else self.incumbent
        assert draft is not None, "both are loaded before the first block"
        return draft

    @property
    def loaded(self) -> tuple[LoadedDraft, ...]:
        """Drafts that the trial holds, the incumbent first."""
        return tuple(draft for draft in (self.incumbent, self.candidate) if draft is not None)

    @property
    def pairs(self) -> tuple[TrialPair, ...]:
        """Newest finished pairs that fit into the report, oldest first."""
        newest: deque[TrialPair] = deque()
        left = MAX_PAIRS_BYTES
        for pair in reversed(self._pairs):
            left -= len(pair.model_dump_json())
            if newest and left < 0:
                break
            newest.appendleft(pair)
        return tuple(newest)

    def begin_block(self) -> BlockCosts:
        """Begin a block, and return its empty accumulator."""
        self.block = BlockCosts(self.trial.block_requests)
        return self.block

    def end_block(self, block: BlockCosts) -> None:
        """Record the costs of the finished block and go on to the next one."""
        if self._first_block is None:
            self._first_block = block.cells
            return
        blocks = (self._first_block, block.cells)
        incumbent, candidate = reversed(blocks) if candidate_first(self.trial.id, self.pair) else blocks
        self._pairs.append(pair_of(self.pair, incumbent, candidate))
        self._first_block = None
        self.pair = max(self.pair + 1, self.trial.first_pair)

    def fail(self, problem: str) -> None:
        """End the trial for a reason and let go of both drafts."""
        self.problem = problem or "unknown reason"
        self.block = self.incumbent = self.candidate = None

    def state(self) -> TrialState:
        """Return the state for the report."""
        return TrialState(
            id=self.trial.id,
            state="Failed" if self.problem else "Loading" if self.block is None else "Running",
            hash=self.candidate.state.hash if self.candidate else "",
            pair=self.pair,
            pairs=self.pairs,
            problem=self.problem[:1000] or None,
        )


# Follower of the plan's assignment in the engine process: it replaces the default draft and runs the trial.
#
# Drafts load in the thread of the DraftSwapQueue. Everything else happens between two steps of the engine loop. During
# a trial both drafts stay loaded. That needs no more memory than a draft swap, which also holds two drafts and is
# refused where they do not fit.

_REPLACED_BY_REQUEST = "a request to PUT /v1/draft replaced the draft during the trial"


class _Load(Enum):
    """Purpose of a draft that the follower loads."""

    GOAL = auto()
    FALLBACK = auto()
    """Draft of the config, because the assigned one could not be loaded at start."""
    CANDIDATE = auto()


class DraftFollower:
    """Follower of one engine's assignment."""

    def __init__(
        self,
        engine: FollowedEngine,
        swaps: DraftSwapQueue,
        install: Callable[[LoadedDraft], None],
        config: WorkerConfig,
        set_plan: Callable[[Plan], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a follower without an assignment.

        Args:
            engine: Engine that runs the default draft.
            swaps: Queue that loads drafts.
            install: Function that passes a loaded draft to the engine. It raises ModelError if that fails.
            config: Config of the worker, with the draft of the spec.
            set_plan: Function that puts a plan in force. It raises ValueError if the engine refuses the plan.
            clock: Monotonic clock.
        """
        self._engine, self._swaps, self._install_draft = engine, swaps, install
        self._config, self._set_plan, self._clock = config, set_plan, clock
        self._worker = worker_name()
        self._convergence = Convergence()
        self._load: _Load | None = None
        self._follows = False
        self._needs_fallback = False
        self._last_problem = ""
        self._run: TrialRun | None = None
        self._held: Plan | None = None

    @property
    def trial(self) -> TrialState | None:
        """Trial for the report; None if the plan assigns none to this worker."""
        return None if self._run is None else self._run.state()

    def start(self, plan: Plan | None, problem: str) -> None:
        """Follow the plan that the engine was started with.

        Args:
            plan: The plan, if any. The engine has it already.
            problem: Reason why the engine was started without the assigned draft; empty if it has it.
        """
        if plan is None:
            return
        self._follow(plan)
        goal = self._convergence.goal
        if problem and goal is not None:
            self._record_failure(problem)
        elif goal is not None and not self._engine.draft.hash:
            self._needs_fallback = bool(goal.hash) and self._config.draft.method != "none"
            self._record_failure(self._engine.draft.problem or "the assigned draft was not loaded")

    def take_plan(self, plan: Plan) -> None:
        """Take a plan, now or at the end of the pair that runs. Raise ValueError if the engine refuses it."""
        run = self._run
        if run is not None and run.block is not None and run.is_same(*self._assigned(plan)):
            self._held = plan
            return
        self._set_plan(plan)
        self._held = None
        self._follow(plan)

    def give_way(self) -> None:
        """Let the request of a client for another default draft pass. The next plan with an assignment ends it."""
        self._load, self._needs_fallback = None, False
        self._convergence.clear()
        if self._run is not None and not self._run.problem:
            self._fail_trial(_REPLACED_BY_REQUEST)
            self._convergence.clear()

    def take_swap(self, swap: DraftSwap) -> None:
        """Take a default draft that has loaded, or the reason why it has not."""
        load, self._load = self._load, None
        problem = self._install(swap.loaded) if swap.loaded and load is not _Load.CANDIDATE else swap.problem
        if load is _Load.CANDIDATE and self._run is not None:
            self._begin_trial(self._run, swap)
        elif load is _Load.GOAL and problem:
            self._record_failure(problem)
        elif load is _Load.GOAL:
            self._convergence.clear()
        elif load is _Load.FALLBACK and not problem:
            self._swaps.record_problem(_NAME, f"the draft of the spec runs: {self._last_problem}")

    def advance(self) -> None:
        """Do what is due between two steps: the next block of a trial, or an attempt to load a draft."""
        run = self._run
        if run is not None and run.block is not None:
            if run.block.is_complete:
                run.end_block(run.block)
                self._next_block(run)
            return
        if self._load is not None:
            return
        if self._needs_fallback:
            self._needs_fallback = False
            self._begin(_Load.FALLBACK, DraftGoal(self._config.draft.model_copy(update={"required": False})))
        elif self._convergence.is_due(self._clock()):
            self._converge()
        elif run is not None and run.is_loading and self._convergence.goal is None:
            candidate = run.trial.candidate
            self._begin(_Load.CANDIDATE, DraftGoal(artifact_config(candidate, self._config), candidate.hash))

    def _assigned(self, plan: Plan) -> tuple[DraftTrial | None, DraftGoal]:
        """Return the trial and the stable draft that a plan assigns to this worker."""
        assignment = followed_assignment(plan, self._config)
        if assignment is None:
            return None, DraftGoal(self._config.draft)
        return trial_of(assignment, self._worker), stable_goal(assignment, self._config)

    def _follow(self, plan: Plan) -> None:
        """Follow the assignment of a plan that is in force: end or begin a trial, and aim for the stable draft."""
        trial, goal = self._assigned(plan)
        run = self._run
        if run is not None and not run.is_same(trial, goal):
            self._leave_trial(goal)
            run = None
        follows = followed_assignment(plan, self._config) is not None
        if not follows and not self._follows:
            return  # a draft that a person has put there stays
        self._follows = follows
        if run is None and trial is not None:
            self._run = TrialRun(trial, goal)
        if self._load is not _Load.CANDIDATE:
            self._aim(goal)

    def _aim(self, goal: DraftGoal) -> None:
        """Make a draft the goal, unless it runs and no other one is loading to replace it."""
        if goal.is_met(self._engine.draft) and not self._is_replaced(goal):
            self._convergence.clear()
        else:
            self._convergence.aim(goal, self._clock())
            if self._load is _Load.GOAL and self._is_replaced(goal):
                self._load = None  # it loads the goal before, which the next attempt replaces

    def _converge(self) -> None:
        """Start to load the goal, or clear it if it runs already."""
        goal = self._convergence.goal
        assert goal is not None
        if goal.is_met(self._engine.draft):
            if self._is_replaced(goal):
                self._swaps.cancel(_NAME)
            self._convergence.clear()
        else:
            self._begin(_Load.GOAL, goal)

    def _is_replaced(self, goal: DraftGoal) -> bool:
        """Return whether another draft than ``goal`` is loading."""
        pending = self._swaps.pending_draft(_NAME)
        return pending is not None and (pending.hash, pending.uri) != (goal.hash, goal.config.uri or "")

    def _install(self, loaded: LoadedDraft) -> str:
        """Pass a loaded draft to the engine. Return the reason if it cannot be used; nothing has changed then."""
        try:
            self._install_draft(loaded)
        except ModelError as error:
            self._swaps.record_problem(_NAME, str(error))
            return str(error)
        return ""

    def _begin(self, load: _Load, goal: DraftGoal) -> None:
        """Start to load a draft. It replaces one that is loading."""
        draft_json = goal.config.model_dump_json(exclude={"name"}).encode()
        try:
            self._swaps.begin(SetDraft(0, draft_json, _NAME, goal.hash))
            self._load = load
        except ModelError as error:
            self._swaps.record_problem(_NAME, str(error))
            if load is _Load.CANDIDATE:
                self._fail_trial(str(error))
            elif load is _Load.GOAL:
                self._record_failure(str(error))

    def _begin_trial(self, run: TrialRun, swap: DraftSwap) -> None:
        """Begin the first block with the candidate that has loaded, or end the trial with the reason of its failure."""
        run.incumbent, run.candidate = self._engine.loaded_draft(), swap.loaded
        if run.candidate is None:
            self._fail_trial(swap.problem)
        elif run.incumbent is None:
            self._fail_trial("no incumbent: this worker runs without a draft")
        else:
            self._next_block(run)

    def _next_block(self, run: TrialRun) -> None:
        """Install the draft of the next block and begin it. Between pairs, a held plan is put in force first.

        The draft is installed also if it runs already, so that guard, caches and burn-in are alike in both blocks.
        """
        if run.is_between_pairs:
            self._take_held(run)
        if problem := self._install(run.next_draft):
            self._fail_trial(problem)
            return
        self._engine.set_block(run.begin_block())

    def _take_held(self, run: TrialRun) -> None:
        """Put the plan in force that has waited for the end of the pair, if there is one."""
        plan, self._held = self._held, None
        if plan is None:
            return
        trial, _ = self._assigned(plan)
        assert trial is not None, "a plan that ends the trial does not wait"
        run.trial = trial
        try:
            self._set_plan(plan)
        except ValueError as error:
            log.warning("the plan that waited for the end of a pair is refused: %s", error)

    def _fail_trial(self, problem: str) -> None:
        """End the trial for a reason, and return to the incumbent."""
        run = self._run
        assert run is not None
        log.warning("the trial %s has failed: %s", run.trial.id, problem)
        self._stop(run, run.stable)
        run.fail(problem)
        self._take_held(run)

    def _leave_trial(self, goal: DraftGoal) -> None:
        """End the trial because the plan does, and run the new goal if the trial has it loaded, else the incumbent."""
        run = self._run
        assert run is not None
        self._run = None
        self._stop(run, goal)

    def _stop(self, run: TrialRun, goal: DraftGoal) -> None:
        """End the blocks of a trial and install ``goal`` or the incumbent, whichever is loaded."""
        if self._load is _Load.CANDIDATE:
            self._swaps.cancel(_NAME)
            self._load = None
        if run.block is None:
            return
        self._engine.set_block(None)
        chosen = next((draft for draft in run.loaded if goal.is_met(draft.state)), run.loaded[0])
        if chosen is not self._engine.loaded_draft() and self._install(chosen):
            self._convergence.aim(goal, self._clock())

    def _record_failure(self, problem: str) -> None:
        """Record a failed attempt to reach the goal. A trial cannot begin without its incumbent."""
        self._last_problem = problem
        self._swaps.record_problem(_NAME, problem)
        self._convergence.record_failure(self._clock())
        if self._run is not None and self._run.is_loading:
            self._fail_trial(f"the incumbent cannot be loaded: {problem}")
