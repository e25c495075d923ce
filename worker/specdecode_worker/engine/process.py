"""The engine process: its loop, its socket, its heartbeat, and the watch over it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from functools import partial
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import msgspec
import zmq

from specdecode_worker.contract import Plan, SyntheticKnobs, WorkerConfig
from specdecode_worker.core.errors import crash_reason, is_sticky_device_error
from specdecode_worker.core.messages import (
    Abort,
    Crashed,
    Done,
    FromEngine,
    GetReport,
    Loaded,
    SetDraft,
    SetPlan,
    SetSynthetic,
    Shutdown,
    Submit,
    ToEngine,
    Tokens,
)
from specdecode_worker.drafts.swap import (
    POLL_SECONDS,
    DraftFollower,
    DraftSwap,
    DraftSwapQueue,
    start_draft,
)
from specdecode_worker.engine.calibration import calibrate, warm_up
from specdecode_worker.models import fetch as model_store
from specdecode_worker.models.errors import CannotServe, ModelError
from specdecode_worker.stages import finish_start, stage
from specdecode_worker.termination import write_termination_message

if TYPE_CHECKING:
    from specdecode_worker.drafts.base import LoadedDraft
    from specdecode_worker.engine.engine import Engine

# The server process imports this module, so it must not import torch.

Build = Callable[[WorkerConfig], tuple["Engine", Loaded]]
"""Callable that loads the models. It runs in the engine process, which may import torch."""


# Engine's end of the sockets between the server and the engine process.


class EnginePort:
    """Engine's end of the socket pair.

    Every wire message is a msgpack list of messages, so that all tokens of a step travel together.
    """

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        # No high-water mark: tokens are never dropped, and a slow reader never blocks a step. The number of requests in
        # flight bounds the queue.
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)
        self._woken = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(list[ToEngine])
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self, timeout_seconds: float) -> list[ToEngine]:
        """Return all pending messages.

        Args:
            timeout_seconds: Maximum time to wait for the first message, in seconds.

        Returns:
            The messages, which may be none.
        """
        self._poller.poll(int(1000 * timeout_seconds))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._woken)
        messages: list[ToEngine] = []
        with contextlib.suppress(zmq.Again):
            while True:
                messages += self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
        return messages

    def wake(self) -> None:
        """End the wait of `receive`, from any thread."""
        os.eventfd_write(self._woken, 1)

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Send the messages as one wire message; do nothing if there are none."""
        if messages:
            self._socket.send(self._encoder.encode(messages))

    def close(self) -> None:
        """Close the socket; unsent messages have one second to leave."""
        self._socket.close()


# Stacks of the engine's threads, written by the engine at a signal, also while its Python code does not run.

STACK_SIGNAL = signal.SIGUSR2
"""Signal for a dump. SIGUSR1 has another meaning in an engine on several devices (`engine/tensor_parallel.py`)."""
WAIT_SECONDS = 2.0
"""Longest time to wait for the dump. A process that can still write one does so within milliseconds."""
_POLL_SECONDS = 0.05
_MAIN = "Current thread"


def install_stack_dump(path: Path) -> None:
    """Write the stacks of all threads to ``path`` at every STACK_SIGNAL to this process."""
    faulthandler.register(STACK_SIGNAL, file=path.open("w"), all_threads=True)


async def request_stacks(pid: int, path: Path) -> str:
    """Return the stacks of the threads of a process, that of the interrupted thread first.

    The answer says so if the process gives none, for example because it is stopped.
    """
    process_state = _process_state(pid)
    size = _size(path)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
    deadline, last = time.monotonic() + WAIT_SECONDS, size
    while time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
        now = _size(path)
        if now > size and now == last:
            return order_stacks(path.read_text(errors="replace")[size:])
        last = now
    return f"no stacks: the engine process gave none within {WAIT_SECONDS:g} s; its state is {process_state}"


def order_stacks(dump: str) -> str:
    """Move the thread that the signal interrupted, usually the main thread, to the start of a dump."""
    threads = dump.strip().split("\n\n")
    return "\n\n".join(sorted(threads, key=lambda text: not text.startswith(_MAIN)))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _process_state(pid: int) -> str:
    """Return the state of a process as the kernel names it, such as "T (stopped)" or "D (disk sleep)"."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return line.removeprefix("State:").strip()
    return "unknown"


# Heartbeat of the engine process: a block of shared memory that the engine writes and the server reads.
#
# The engine never waits to write it. The server can read it while the engine is stopped or hangs, which no message over
# a socket allows. All times are readings of CLOCK_MONOTONIC, which both processes share.

BEAT_SECONDS = 0.2
"""Interval of the beats of an idle engine. Readers may rely on 250 ms."""
_FACTS = struct.Struct("7d")
_VERSION_BYTES = 8
_READ_ATTEMPTS = 100


class Phase(IntEnum):
    """Activity of the engine process."""

    LOADING = 0
    WARMING_UP = 1
    CALIBRATING = 2
    IDLE = 3
    STEP = 4
    CAPTURING = 5
    SWAPPING = 6


class Heartbeat(NamedTuple):
    """Facts of the last beat. ``rows`` and ``prefill_tokens`` are those of the last launched step."""

    phase: Phase
    phase_began_seconds: float
    beat_seconds: float
    step: int
    """Number of the last step that began; 0 before the first step after the start."""
    rows: int
    prefill_tokens: int
    longest_step_seconds: float


class HeartbeatBlock:
    """Shared memory with one heartbeat. Pass it to the engine process as an argument of its start.

    A version number that is odd during a write protects readers from a heartbeat that is half old and half new.
    """

    def __init__(self) -> None:
        # Unlinked shared memory that a spawned child inherits; it leaves no file behind after a crash.
        self._fields: ctypes.Array[ctypes.c_double] = RawArray(ctypes.c_double, 8)
        self.write(Heartbeat(Phase.LOADING, time.monotonic(), time.monotonic(), 0, 0, 0, 0.0))

    def write(self, beat: Heartbeat) -> None:
        """Replace the heartbeat. There must be one writer at a time."""
        fields = self._fields
        fields[0] += 1
        _FACTS.pack_into(fields, _VERSION_BYTES, *beat)
        fields[0] += 1

    def read(self) -> Heartbeat:
        """Return the heartbeat. A writer that was stopped in the middle of a write does not block the reader."""
        values = list(self._fields)
        for _ in range(_READ_ATTEMPTS):
            version, values = self._fields[0], list(self._fields)
            if version % 2 == 0 and version == values[0] == self._fields[0]:
                break
        _, phase, phase_began, beat, step, rows, prefill_tokens, longest_step = values
        return Heartbeat(Phase(int(phase)), phase_began, beat, int(step), int(rows), int(prefill_tokens), longest_step)


class HeartbeatWriter:
    """Writer of the heartbeat in the engine process."""

    def __init__(self, block: HeartbeatBlock, clock: Callable[[], float] = time.monotonic) -> None:
        self._block, self._clock, now = block, clock, clock()
        self._write(Heartbeat(Phase.LOADING, now, now, 0, 0, 0, 0.0))

    def enter(self, phase: Phase) -> None:
        """Begin a phase, or beat if it has begun already. The end of a step updates the longest step."""
        now, beat = self._clock(), self._beat
        began, longest = beat.phase_began_seconds, beat.longest_step_seconds
        if beat.phase is Phase.STEP:
            longest = max(longest, now - began)
        if phase is Phase.STEP:
            self._write(Heartbeat(phase, now, now, beat.step + 1, 0, 0, longest))
        else:
            began = now if phase is not beat.phase else began
            self._write(Heartbeat(phase, began, now, beat.step, beat.rows, beat.prefill_tokens, longest))

    def record_launch(self, rows: int, prefill_tokens: int) -> None:
        """Beat with the size of the step that is launched now, in any phase."""
        self._write(self._beat._replace(beat_seconds=self._clock(), rows=rows, prefill_tokens=prefill_tokens))

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Run a block in this phase and return to the previous one, whose time then begins again."""
        before = self._beat.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before if before is not Phase.STEP else Phase.IDLE)

    def _write(self, beat: Heartbeat) -> None:
        self._beat = beat
        self._block.write(beat)


# Policy of the engine watchdog: whether an engine makes progress, is suspect or hangs, by its heartbeat.

SUSPECT_SHARE = 0.5
"""Share of the bound after which an engine is suspect."""
LONGEST_STEP_FACTOR = 10.0
"""A step may take this many times as long as the longest step so far."""
SECONDS_PER_PREFILL_TOKEN = 0.02
"""Time that a prefill token may take, which is 50 tokens a second: slow for an 8B model on a CPU."""
PHASE_SECONDS = {
    Phase.WARMING_UP: 1800.0,
    Phase.CALIBRATING: 600.0,
    Phase.CAPTURING: 1800.0,
    Phase.SWAPPING: 600.0,
}
"""Bounds of phases without steps of clients. The first steps may compile kernels, which takes minutes."""
MAX_POLL_GAP_SECONDS = 5.0
"""Time between two observations beyond which the whole machine or container was stopped, and not the engine alone."""


class State(Enum):
    """Judgement of the watchdog."""

    OK = auto()
    SUSPECT = auto()
    HUNG = auto()


@dataclass(frozen=True, slots=True)
class Assessment:
    """State of the engine with the facts behind it."""

    state: State
    heartbeat: Heartbeat
    silent_seconds: float
    """Time without a beat."""
    bound_seconds: float | None
    """Time without a beat after which the engine is hung; None for no bound."""

    def __str__(self) -> str:
        beat = self.heartbeat
        bound = "" if self.bound_seconds is None else f" (bound {self.bound_seconds:.1f} s)"
        return (
            f"no progress for {self.silent_seconds:.1f} s{bound} in phase {beat.phase.name.lower()}, "
            f"step {beat.step}, {beat.rows} rows, {beat.prefill_tokens} prefill tokens, "
            f"longest step so far {beat.longest_step_seconds:.2f} s"
        )


def bound_seconds(beat: Heartbeat, step_timeout_seconds: float) -> float | None:
    """Return the time without a beat after which an engine in this phase is hung; None for no bound.

    Loading has no bound, because the startup probe of the pod limits it.
    """
    step_seconds = max(
        step_timeout_seconds,
        LONGEST_STEP_FACTOR * beat.longest_step_seconds,
        SECONDS_PER_PREFILL_TOKEN * beat.prefill_tokens,
    )
    if beat.phase is Phase.LOADING:
        return None
    if beat.phase is Phase.IDLE:
        return step_timeout_seconds
    return max(PHASE_SECONDS.get(beat.phase, 0.0), step_seconds)


class EngineWatchdog:
    """Judge of one engine. It observes the heartbeat several times a second and knows no clock of its own."""

    def __init__(self, step_timeout_seconds: float) -> None:
        self._step_timeout_seconds = step_timeout_seconds
        self._observed_seconds: float | None = None
        self._resumed_seconds = 0.0
        self._state = State.OK

    def observe(self, beat: Heartbeat, now: float) -> Assessment:
        """Judge the engine by its heartbeat at this time.

        An engine is hung only if it was suspect before, so that no single reading ends a worker. After a gap between
        two observations the silence counts from the second one: the process of the watchdog did not run either.
        """
        if self._observed_seconds is not None and now - self._observed_seconds > MAX_POLL_GAP_SECONDS:
            self._resumed_seconds = now
        self._observed_seconds = now
        silent_seconds = max(now - max(beat.beat_seconds, self._resumed_seconds), 0.0)
        bound = bound_seconds(beat, self._step_timeout_seconds)
        self._state = self._judge(silent_seconds, bound)
        return Assessment(self._state, beat, silent_seconds, bound)

    def _judge(self, silent_seconds: float, bound: float | None) -> State:
        if bound is None or silent_seconds < SUSPECT_SHARE * bound:
            return State.OK
        return State.HUNG if silent_seconds >= bound and self._state is not State.OK else State.SUSPECT


# Main loop of the engine process: receive messages, run steps, send tokens.
#
# EngineClient starts the process and is its only peer. The engine has a process of its own so that the Python code of
# the HTTP server never delays a step; the two share only a pair of sockets and the heartbeat. The loop sleeps on its
# socket while there is nothing to compute.

CALIBRATION_SECONDS = 5.0
"""Time limit of the calibration of plain steps at start, in seconds; calibration of tree shapes has the same limit."""
PADDED_CALIBRATION_SECONDS = 60.0
"""CALIBRATION_SECONDS for a worker with synthetic knobs. It is longer because the knobs may pad every step."""

EXIT_SECONDS = 3.0
"""Time limit of the regular exit of the interpreter after a crash, in seconds."""


class EngineLoop:
    """Loop of the engine process: handle messages, take over loaded drafts, run a step, send its tokens."""

    def __init__(self, engine: Engine, port: EnginePort, heartbeat: HeartbeatWriter, config: WorkerConfig) -> None:
        """Create the loop of an engine that was built from ``config``."""
        self._engine = engine
        self._port = port
        self._heartbeat = heartbeat
        self._swaps = DraftSwapQueue(engine.load_draft)
        install = partial(self._install, "")
        self._follower = DraftFollower(engine, self._swaps, install, config, self._set_plan)
        self._running = True

    def follow(self, plan: Plan | None, problem: str) -> None:
        """Follow the assignment of the initial plan; see `DraftFollower.start`."""
        self._follower.start(plan, problem)

    def run(self) -> None:
        """Run until a Shutdown message arrives."""
        while self._running:
            if self._engine.idle:
                self._heartbeat.enter(Phase.IDLE)
            for message in self._port.receive(self._wait_seconds()):
                self._port.send(self._handle(message))
            for swap in self._swaps.finished():
                self._take_swap(swap)
                del swap  # it would keep a draft that does not run, with its cache
            self._follower.advance()
            if self._running and not self._engine.idle:
                self._heartbeat.enter(Phase.STEP)
                self._port.send(self._engine.step())
        self._swaps.close()

    def _wait_seconds(self) -> float:
        """Return how long to wait for a message, in seconds: 0 while there is work, else until the next beat."""
        if not self._engine.idle:
            return 0
        return POLL_SECONDS if self._swaps.pending else BEAT_SECONDS

    def _take_swap(self, swap: DraftSwap) -> None:
        """Pass a loaded draft to the engine. If that fails, the previous draft stays in use."""
        if not swap.name:
            self._follower.take_swap(swap)
        elif swap.loaded is not None:
            try:
                self._install(swap.name, swap.loaded)
            except ModelError as error:
                self._swaps.record_problem(swap.name, str(error))

    def _install(self, name: str, loaded: LoadedDraft) -> None:
        """Replace a draft and send the tokens of the steps in flight. Raise ModelError if it cannot be used."""
        with self._heartbeat.during(Phase.SWAPPING):
            tokens = self._engine.set_draft(name, loaded)
        self._port.send(tokens)

    def _set_plan(self, plan: Plan) -> None:
        with self._heartbeat.during(Phase.CAPTURING):  # a plan may start the capture of graphs
            self._engine.set_plan(plan)

    def _handle(self, message: ToEngine) -> list[FromEngine]:
        match message:
            case Submit():
                return self._add(message)
            case Abort(request_id, stopped):
                self._engine.abort(request_id, stopped=stopped)
            case Shutdown():
                self._running = False
            case SetDraft() | SetPlan() | SetSynthetic() | GetReport():
                return [self._answer(message)]
        return []

    def _add(self, request: Submit) -> list[FromEngine]:
        try:
            self._engine.add(request)
        except ValueError as error:
            return [Tokens(request_id=request.request_id, tokens=(), finish="error", error=str(error))]
        return []

    def _answer(self, call: SetDraft | SetPlan | SetSynthetic | GetReport) -> Done:
        """Execute a call and return its answer, which holds the error of a failed call. The engine continues.

        An error after which the device cannot be used is raised.
        """
        try:
            return Done(call_id=call.call_id, body=self._call(call))
        except ModelError as error:
            return Done(call_id=call.call_id, error=str(error))
        except Exception as error:
            if is_sticky_device_error(error):
                raise
            traceback.print_exc()
            return Done(call_id=call.call_id, error=f"{type(error).__name__}: {error}")

    def _call(self, call: SetDraft | SetPlan | SetSynthetic | GetReport) -> bytes:
        match call:
            case SetDraft():
                self._swaps.begin(call, self._engine.draft_names)
                if not call.name:
                    self._follower.give_way()
            case SetPlan(_, plan_json):
                self._follower.take_plan(Plan.model_validate_json(plan_json))
            case SetSynthetic(_, knobs_json):
                self._engine.set_synthetic(
                    None if knobs_json == b"null" else SyntheticKnobs.model_validate_json(knobs_json)
                )
            case GetReport():
                report = self._engine.report(self._swaps.status(), self._follower.trial)
                return report.model_dump_json().encode()
        return b""


def main(
    address: str,
    config_json: str,
    plan_json: str | None,
    knobs_json: str | None,
    build: Build | None,
    block: HeartbeatBlock,
    stacks_path: str,
) -> None:
    """Run the engine process: load the models, warm up, calibrate, send Loaded, then run the loop.

    The process exits with code 0 after Shutdown, and with code 1 after it has sent a Crashed message.

    Args:
        address: ZeroMQ address of the client's socket.
        config_json: WorkerConfig as JSON.
        plan_json: Initial Plan as JSON, if any.
        knobs_json: Initial SyntheticKnobs as JSON, if any.
        build: Loads the engine; tests replace it.
        block: Shared memory for the heartbeat.
        stacks_path: File to which a STACK_SIGNAL writes the stacks of all threads.
    """
    install_stack_dump(Path(stacks_path))
    port, heartbeat = EnginePort(address), HeartbeatWriter(block)
    try:
        config = WorkerConfig.model_validate_json(config_json)
        plan = None if plan_json is None else Plan.model_validate_json(plan_json)
        started, problem = start_draft(config, plan, lambda uri: model_store.resolve(uri, Path(config.cache_dir)))
        engine, loaded = (build or _build)(started)
        engine.on_launch = heartbeat.record_launch
        _prepare(engine, heartbeat, plan, knobs_json)
        port.send([loaded])
        loop = EngineLoop(engine, port, heartbeat, config)
        loop.follow(plan, problem)
        listening = config.engine.block_port
        own_address = None if listening is None else (config.server.host, listening)
        if block_port := engine.open_exchange(own_address, port.wake):
            print(f"specdecode-worker: block port: {block_port}", file=sys.stderr, flush=True)
        loop.run()
        engine.close()
    except Exception as error:
        if isinstance(error, CannotServe):
            write_termination_message(error.verdict.model_dump_json())
        port.send([Crashed(crash_reason(error))])
        port.close()
        zmq.Context.instance().term()  # waits until the message has left, for at most one second
        _exit_after_crash(at_once=is_sticky_device_error(error))
    port.close()


def _prepare(engine: Engine, heartbeat: HeartbeatWriter, plan: Plan | None, knobs_json: str | None) -> None:
    """Apply the initial plan and knobs, warm up and calibrate, each as a phase of the heartbeat."""
    if plan is not None:
        heartbeat.enter(Phase.CAPTURING)
        with stage("capture"):
            engine.set_plan(plan)
    if knobs_json is not None:
        # Set before the calibration, so that the calibrated step times include the padding of the knobs.
        engine.set_synthetic(SyntheticKnobs.model_validate_json(knobs_json))
    heartbeat.enter(Phase.WARMING_UP)
    with stage("compile"):
        warm_up(engine)
    heartbeat.enter(Phase.CALIBRATING)
    with stage("calibrate"):
        calibrate(engine, CALIBRATION_SECONDS if knobs_json is None else PADDED_CALIBRATION_SECONDS)
    finish_start()


def _exit_after_crash(*, at_once: bool) -> NoReturn:
    """Exit with code 1.

    The regular exit of the interpreter waits for threads and for the device. It has a time limit, and with ``at_once``
    it is skipped, because with a broken device it may take forever.
    """
    if not at_once:
        timer = threading.Timer(EXIT_SECONDS, _exit_now)
        timer.daemon = True
        timer.start()
        sys.exit(1)
    _exit_now()


def _exit_now() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _build(config: WorkerConfig) -> tuple[Engine, Loaded]:
    # These import torch, which the parent process must not do.
    from specdecode_worker.engine.factory import device_of, load_engine
    from specdecode_worker.engine.kernel_class import kernel_class

    engine = load_engine(config, lambda uri: model_store.resolve(uri, Path(config.cache_dir)))
    report = engine.report()
    return engine, Loaded(
        max_model_len=engine.max_model_len,
        target=report.target,
        draft_hash=report.draft.hash,
        draft_problem=report.draft.problem or "",
        eos_token_ids=engine.eos_token_ids,
        vocab_size=engine.vocab_size,
        kernel_class=kernel_class(device_of(config.engine.device)),
    )
