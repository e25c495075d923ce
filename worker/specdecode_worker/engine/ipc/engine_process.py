"""Main loop of the engine process: receive messages, run steps, send tokens.

EngineClient starts the process and is its only peer. The engine has a process of its own so that the Python code of
the HTTP server never delays a step; the two share only a pair of sockets and the heartbeat. The loop sleeps on its
socket while there is nothing to compute.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from specdecode_worker.contract import Plan, SyntheticKnobs, WorkerConfig
from specdecode_worker.engine.assignment.assigned_draft import start_draft
from specdecode_worker.engine.assignment.default_draft import DefaultDraft
from specdecode_worker.engine.assignment.draft_follower import DraftFollower
from specdecode_worker.engine.drafts.draft_swap import POLL_SECONDS, DraftSwap, DraftSwapQueue
from specdecode_worker.engine.errors import RankLost, is_sticky_device_error
from specdecode_worker.engine.ipc.engine_interface import Build, Engine
from specdecode_worker.engine.ipc.engine_port import EnginePort
from specdecode_worker.engine.ipc.heartbeat import BEAT_SECONDS, HeartbeatBlock, HeartbeatWriter, Phase
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
from specdecode_worker.engine.ipc.stack_dump import install_stack_dump
from specdecode_worker.engine.stats.step_time_calibration import calibrate
from specdecode_worker.models.checkpoints import model_store
from specdecode_worker.models.errors import CannotServe, ModelError
from specdecode_worker.termination import write_termination_message

if TYPE_CHECKING:  # the server process imports this module and must not import torch
    from specdecode_worker.engine.drafts.loaded_draft import LoadedDraft


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
        draft = DefaultDraft(engine, self._swaps, lambda loaded: self._install("", loaded))
        self._follower = DraftFollower(draft, config, self._set_plan)
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


def warm_up(engine: Engine) -> None:
    """Run one request to its end, so that one-time costs do not delay the first request of a client."""
    sampling = Sampling(max_tokens=4, seed=0, temperature=0.0, ignore_eos=True)
    engine.add(Submit(request_id="warm-up", prompt=(1,) * 4, sampling=sampling, arrival_seconds=time.monotonic()))
    while not engine.idle:
        engine.step()


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
        started = start_draft(config, plan, lambda uri: model_store.resolve(uri, Path(config.cache_dir)))
        engine, loaded = (build or _build)(started.config)
        engine.on_launch = heartbeat.record_launch
        _prepare(engine, heartbeat, plan, knobs_json)
        port.send([loaded])
        loop = EngineLoop(engine, port, heartbeat, config)
        loop.follow(plan, started.problem)
        loop.run()
    except Exception as error:
        if isinstance(error, CannotServe):
            write_termination_message(error.verdict.model_dump_json())
        port.send([Crashed(_crash_reason(error))])
        port.flush_and_close()
        _exit_after_crash(at_once=is_sticky_device_error(error))
    port.close()


def _prepare(engine: Engine, heartbeat: HeartbeatWriter, plan: Plan | None, knobs_json: str | None) -> None:
    """Apply the initial plan and knobs, warm up and calibrate, each as a phase of the heartbeat."""
    if plan is not None:
        heartbeat.enter(Phase.CAPTURING)
        engine.set_plan(plan)
    if knobs_json is not None:
        # Set before the calibration, so that the calibrated step times include the padding of the knobs.
        engine.set_synthetic(SyntheticKnobs.model_validate_json(knobs_json))
    heartbeat.enter(Phase.WARMING_UP)
    warm_up(engine)
    heartbeat.enter(Phase.CALIBRATING)
    calibrate(engine, CALIBRATION_SECONDS if knobs_json is None else PADDED_CALIBRATION_SECONDS)


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


def _crash_reason(error: Exception) -> str:
    """Return the reason of a crash.

    A ModelError or RankLost explains itself; any other error is a bug, so its traceback is logged.
    """
    if isinstance(error, ModelError | RankLost):
        return str(error)
    traceback.print_exc()
    return f"{type(error).__name__}: {error}"


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
