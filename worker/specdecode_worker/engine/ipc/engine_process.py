"""The engine loop, in a process of its own: messages in, steps, tokens out.

``client`` starts it and is its only peer. No Python of the HTTP path ever holds up a step: the two share nothing but
a pair of sockets. The loop sleeps on its socket while there is nothing to compute, and ends when its parent does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from specdecode_worker.contract import Plan, Report, SyntheticKnobs, WorkerConfig
from specdecode_worker.engine.drafts.draft_swap import POLL_SECONDS, Swap, Swaps
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
from specdecode_worker.engine.stats.step_time_calibration import Calibrated, calibrate
from specdecode_worker.models.checkpoints import model_store
from specdecode_worker.models.errors import CannotServe, ModelError
from specdecode_worker.termination import write_termination_message

if TYPE_CHECKING:  # the server's process imports this module, and no torch
    from specdecode_worker.engine.drafts.draft_registry import LoadDraft, LoadedDraft


CALIBRATION_SECONDS = 5.0
"""Most time that a start is delayed for it, and once more for shapes."""
PADDED_CALIBRATION_SECONDS = 60.0
"""The same where knobs pad steps: what a proof's worker knows of loads is as much as others know."""


class Engine(Calibrated, Protocol):
    """What the loop needs of an engine; ``engine.engine.Engine`` is the one."""

    @property
    def idle(self) -> bool:
        """Nothing to compute until the next message."""
        ...

    def report(self) -> Report: ...

    def set_plan(self, plan: Plan) -> None: ...

    def set_synthetic(self, knobs: SyntheticKnobs | None) -> None: ...

    @property
    def load_draft(self) -> LoadDraft | None:
        """Loads a draft beside those that run, in a thread of its own; None where none can be."""
        ...

    def set_draft(self, name: str, loaded: LoadedDraft) -> list[Tokens]: ...


Build = Callable[[WorkerConfig], tuple[Engine, Loaded]]
"""Loads the models. Runs in the engine's process, where torch may be imported."""


class EnginePort:
    """The engine's end of the sockets; every message is a msgpack list, so that a step's tokens travel as one."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        # Tokens must never be dropped and a slow reader must never stop a step; requests in flight bound the queue.
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

    def receive(self, patience_seconds: float | None) -> list[ToEngine]:
        """All messages that are there; sleeps for as long until there is one, None for ever. A dead parent means
        Shutdown."""
        events = dict(self._poller.poll(None if patience_seconds is None else int(1000 * patience_seconds)))
        if self._parent in events:
            return [Shutdown()]
        found: list[ToEngine] = []
        with contextlib.suppress(zmq.Again):
            while True:
                found += self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
        return found

    def send(self, messages: Sequence[FromEngine]) -> None:
        if messages:
            self._socket.send(self._encoder.encode(messages))

    def close(self) -> None:
        self._socket.close()


class EngineLoop:
    """Drains messages, steps, sends; until Shutdown."""

    def __init__(self, engine: Engine, port: EnginePort) -> None:
        self._engine = engine
        self._port = port
        self._swaps = Swaps(engine.load_draft)
        self._running = True

    def run(self) -> None:
        while self._running:
            for message in self._port.receive(self._patience()):
                self._port.send(self._take(message))
            for swap in self._swaps.finished():
                self._port.send(self._take_over(swap))
            if self._running and not self._engine.idle:
                self._port.send(self._engine.step())
        self._swaps.close()

    def _patience(self) -> float | None:
        """Seconds to wait for a message: none while there is something to compute."""
        if not self._engine.idle:
            return 0
        return POLL_SECONDS if self._swaps.pending else None

    def _take_over(self, swap: Swap) -> list[FromEngine]:
        if swap.loaded is None:
            return [Done(call_id=swap.call_id, error=swap.problem)]
        return [*self._engine.set_draft(swap.name, swap.loaded), Done(call_id=swap.call_id)]

    def _take(self, message: ToEngine) -> list[FromEngine]:
        match message:
            case Submit():
                return self._add(message)
            case Abort(request_id):
                self._engine.abort(request_id)
            case SetDraft():
                self._swaps.begin(message)
            case Shutdown():
                self._running = False
            case SetPlan() | SetSynthetic() | GetReport():
                return [self._answer(message)]
        return []

    def _add(self, request: Submit) -> list[FromEngine]:
        try:
            self._engine.add(request)
        except ValueError as error:
            return [Tokens(request_id=request.request_id, tokens=(), finish="error", error=str(error))]
        return []

    def _answer(self, call: SetPlan | SetSynthetic | GetReport) -> Done:
        """A call that fails is answered so; only a failing step ends the engine."""
        try:
            return Done(call_id=call.call_id, body=self._call(call))
        except Exception as error:
            traceback.print_exc()
            return Done(call_id=call.call_id, error=f"{type(error).__name__}: {error}")

    def _call(self, call: SetPlan | SetSynthetic | GetReport) -> bytes:
        match call:
            case SetPlan(_, plan_json):
                self._engine.set_plan(Plan.model_validate_json(plan_json))
            case SetSynthetic(_, knobs_json):
                self._engine.set_synthetic(
                    None if knobs_json == b"null" else SyntheticKnobs.model_validate_json(knobs_json)
                )
            case GetReport():
                return self._engine.report().model_dump_json().encode()
        return b""


def warm_up(engine: Engine) -> None:
    """A request through the whole path, so that the first user does not pay for what only the first one costs."""
    sampling = Sampling(max_tokens=4, seed=0, temperature=0.0, ignore_eos=True)
    engine.add(Submit(request_id="warm-up", prompt=(1,) * 4, sampling=sampling, arrival_seconds=time.monotonic()))
    while not engine.idle:
        engine.step()


def main(
    address: str, config_json: str, plan_json: str | None, knobs_json: str | None, build: Build | None = None
) -> None:
    """Entry of the process. Exits 0 after Shutdown, 1 after a Crashed message."""
    # Ctrl-C reaches the whole process group; the parent drains first and then says Shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    port = EnginePort(address)
    try:
        engine, loaded = (build or _build)(WorkerConfig.model_validate_json(config_json))
        if plan_json is not None:
            engine.set_plan(Plan.model_validate_json(plan_json))
        if knobs_json is not None:
            # Before anything is timed: what is told of steps then is what they will take.
            engine.set_synthetic(SyntheticKnobs.model_validate_json(knobs_json))
        warm_up(engine)
        calibrate(engine, CALIBRATION_SECONDS if knobs_json is None else PADDED_CALIBRATION_SECONDS)
        port.send([loaded])
        EngineLoop(engine, port).run()
    except Exception as error:
        if isinstance(error, CannotServe):
            write_termination_message(error.verdict.model_dump_json())
        port.send([Crashed(_last_words(error))])
        port.close()
        sys.exit(1)
    port.close()


def _last_words(error: Exception) -> str:
    """What a user named wrongly needs no traceback; everything else is a bug and gets one in the log."""
    if isinstance(error, ModelError | RankLost):
        return str(error)
    traceback.print_exc()
    return f"{type(error).__name__}: {error}"


def _build(config: WorkerConfig) -> tuple[Engine, Loaded]:
    from specdecode_worker.engine.factory import load_engine  # imports torch, which the parent must not

    engine = load_engine(config, lambda uri: model_store.resolve(uri, Path(config.cache_dir)))
    report = engine.report()
    return engine, Loaded(
        max_model_len=engine.max_model_len,
        target=report.target,
        draft_hash=report.draft.hash,
        draft_problem=report.draft.problem or "",
        eos_token_ids=engine.eos_token_ids,
    )
