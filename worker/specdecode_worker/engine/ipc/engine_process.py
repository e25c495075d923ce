"""Main loop of the engine process: receive messages, run steps, send tokens.

EngineClient starts the process and is its only peer. The engine has a process of its own so that the Python code of
the HTTP server never delays a step; the two share only a pair of sockets. The loop sleeps on its socket while there is
nothing to compute, and ends when its parent process does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from specdecode_worker.contract import Plan, Report, SyntheticKnobs, WorkerConfig
from specdecode_worker.engine.drafts.draft_swap import POLL_SECONDS, DraftSwap, DraftSwapQueue, SwapStatus
from specdecode_worker.engine.errors import RankLost
from specdecode_worker.engine.ipc.messages import (
    Abort,
    Crashed,
    Done,
    FromEngine,
    GetReport,
    Loaded,
    Sampling,
    SetDraft,
    SetPlan,
    SetSynthetic,
    Shutdown,
    Submit,
    ToEngine,
    Tokens,
)
from specdecode_worker.engine.stats.step_time_calibration import CalibrationTarget, calibrate
from specdecode_worker.models.checkpoints import model_store
from specdecode_worker.models.errors import CannotServe, ModelError
from specdecode_worker.termination import write_termination_message

if TYPE_CHECKING:  # the server process imports this module and must not import torch
    from specdecode_worker.engine.drafts.draft_registry import LoadDraft, LoadedDraft


CALIBRATION_SECONDS = 5.0
"""Time limit of the calibration of plain steps at start, in seconds; calibration of tree shapes has the same limit."""
PADDED_CALIBRATION_SECONDS = 60.0
"""CALIBRATION_SECONDS for a worker with synthetic knobs. It is longer because the knobs may pad every step."""


class Engine(CalibrationTarget, Protocol):
    """Interface of the engine that the loop drives; ``engine.engine.Engine`` implements it."""

    @property
    def idle(self) -> bool:
        """True if there is nothing to compute until the next message."""
        ...

    def report(self, swaps: Mapping[str, SwapStatus] = ...) -> Report:
        """Return the worker report, with the swaps of drafts by name."""
        ...

    @property
    def draft_names(self) -> Sequence[str]:
        """Names of the drafts, loaded or not; empty for the default draft."""
        ...

    def set_plan(self, plan: Plan) -> None:
        """Replace the plan."""
        ...

    def set_synthetic(self, knobs: SyntheticKnobs | None) -> None:
        """Replace the synthetic knobs; None clears them."""
        ...

    @property
    def load_draft(self) -> LoadDraft | None:
        """Callable that loads a draft in another thread while the engine runs; None if no draft can be loaded."""
        ...

    def set_draft(self, name: str, loaded: LoadedDraft) -> list[Tokens]:
        """Replace the draft of this name. Return the tokens of the steps that were in flight.

        Raises:
            ModelError: The draft cannot be used; nothing has changed.
        """
        ...


Build = Callable[[WorkerConfig], tuple[Engine, Loaded]]
"""Callable that loads the models. It runs in the engine process, which may import torch."""


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
        self._decoder = msgspec.msgpack.Decoder(list[ToEngine])
        self._encoder = msgspec.msgpack.Encoder()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        parent = multiprocessing.parent_process()
        self._parent = None if parent is None else parent.sentinel
        if self._parent is not None:
            self._poller.register(self._parent, zmq.POLLIN)

    def receive(self, timeout_seconds: float | None) -> list[ToEngine]:
        """Return all pending messages.

        Args:
            timeout_seconds: Maximum time to wait for the first message, in seconds; None waits without limit.

        Returns:
            The messages, which may be none; a Shutdown if the parent process has ended.
        """
        events = dict(self._poller.poll(None if timeout_seconds is None else int(1000 * timeout_seconds)))
        if self._parent in events:
            return [Shutdown()]
        messages: list[ToEngine] = []
        with contextlib.suppress(zmq.Again):
            while True:
                messages += self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
        return messages

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Send the messages as one wire message; do nothing if there are none."""
        if messages:
            self._socket.send(self._encoder.encode(messages))

    def close(self) -> None:
        """Close the socket; unsent messages have one second to leave."""
        self._socket.close()


class EngineLoop:
    """Loop of the engine process: handle messages, take over loaded drafts, run a step, send its tokens."""

    def __init__(self, engine: Engine, port: EnginePort) -> None:
        self._engine = engine
        self._port = port
        self._swaps = DraftSwapQueue(engine.load_draft)
        self._running = True

    def run(self) -> None:
        """Run until a Shutdown message arrives."""
        while self._running:
            for message in self._port.receive(self._wait_seconds()):
                self._port.send(self._handle(message))
            for swap in self._swaps.finished():
                self._port.send(self._apply_swap(swap))
            if self._running and not self._engine.idle:
                self._port.send(self._engine.step())
        self._swaps.close()

    def _wait_seconds(self) -> float | None:
        """Return how long to wait for a message, in seconds: 0 while there is work, None for no limit."""
        if not self._engine.idle:
            return 0
        return POLL_SECONDS if self._swaps.pending else None

    def _apply_swap(self, swap: DraftSwap) -> list[FromEngine]:
        """Pass a loaded draft to the engine. If that fails, the previous draft stays in use."""
        if swap.loaded is None:
            return []
        try:
            return list(self._engine.set_draft(swap.name, swap.loaded))
        except ModelError as error:
            self._swaps.record_problem(swap.name, str(error))
            return []

    def _handle(self, message: ToEngine) -> list[FromEngine]:
        match message:
            case Submit():
                return self._add(message)
            case Abort(request_id):
                self._engine.abort(request_id)
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
        """Execute a call and return its answer, which holds the error of a failed call. The engine continues."""
        try:
            return Done(call_id=call.call_id, body=self._call(call))
        except ModelError as error:
            return Done(call_id=call.call_id, error=str(error))
        except Exception as error:
            traceback.print_exc()
            return Done(call_id=call.call_id, error=f"{type(error).__name__}: {error}")

    def _call(self, call: SetDraft | SetPlan | SetSynthetic | GetReport) -> bytes:
        match call:
            case SetDraft():
                self._swaps.begin(call, self._engine.draft_names)
            case SetPlan(_, plan_json):
                self._engine.set_plan(Plan.model_validate_json(plan_json))
            case SetSynthetic(_, knobs_json):
                self._engine.set_synthetic(
                    None if knobs_json == b"null" else SyntheticKnobs.model_validate_json(knobs_json)
                )
            case GetReport():
                return self._engine.report(self._swaps.status()).model_dump_json().encode()
        return b""


def warm_up(engine: Engine) -> None:
    """Run one request to its end, so that one-time costs do not delay the first request of a client."""
    sampling = Sampling(max_tokens=4, seed=0, temperature=0.0, ignore_eos=True)
    engine.add(Submit(request_id="warm-up", prompt=(1,) * 4, sampling=sampling, arrival_seconds=time.monotonic()))
    while not engine.idle:
        engine.step()


def main(
    address: str, config_json: str, plan_json: str | None, knobs_json: str | None, build: Build | None = None
) -> None:
    """Run the engine process: load the models, warm up, calibrate, send Loaded, then run the loop.

    The process exits with code 0 after Shutdown, and with code 1 after it has sent a Crashed message.

    Args:
        address: ZeroMQ address of the client's socket.
        config_json: WorkerConfig as JSON.
        plan_json: Initial Plan as JSON, if any.
        knobs_json: Initial SyntheticKnobs as JSON, if any.
        build: Loads the engine; tests replace it.
    """
    # Ctrl-C reaches the whole process group. The parent drains its requests first and then sends Shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    port = EnginePort(address)
    try:
        engine, loaded = (build or _build)(WorkerConfig.model_validate_json(config_json))
        if plan_json is not None:
            engine.set_plan(Plan.model_validate_json(plan_json))
        if knobs_json is not None:
            # Set before the calibration, so that the calibrated step times include the padding of the knobs.
            engine.set_synthetic(SyntheticKnobs.model_validate_json(knobs_json))
        warm_up(engine)
        calibrate(engine, CALIBRATION_SECONDS if knobs_json is None else PADDED_CALIBRATION_SECONDS)
        port.send([loaded])
        EngineLoop(engine, port).run()
    except Exception as error:
        if isinstance(error, CannotServe):
            write_termination_message(error.verdict.model_dump_json())
        port.send([Crashed(_crash_reason(error))])
        port.close()
        sys.exit(1)
    port.close()


def _crash_reason(error: Exception) -> str:
    """Return the reason of a crash.

    A ModelError or RankLost explains itself; any other error is a bug, so its traceback is logged.
    """
    if isinstance(error, ModelError | RankLost):
        return str(error)
    traceback.print_exc()
    return f"{type(error).__name__}: {error}"


def _build(config: WorkerConfig) -> tuple[Engine, Loaded]:
    from specdecode_worker.engine.factory import load_engine  # imports torch, which the parent process must not do

    engine = load_engine(config, lambda uri: model_store.resolve(uri, Path(config.cache_dir)))
    report = engine.report()
    return engine, Loaded(
        max_model_len=engine.max_model_len,
        target=report.target,
        draft_hash=report.draft.hash,
        draft_problem=report.draft.problem or "",
        eos_token_ids=engine.eos_token_ids,
    )
