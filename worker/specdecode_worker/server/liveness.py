"""Parts of the server process that notice a failure of the engine or of the server, and end the process in time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from specdecode_worker.capture import CaptureError, Recorder
from specdecode_worker.capture.records import load_hook
from specdecode_worker.capture.segments import SegmentWriter
from specdecode_worker.contract import CaptureConfig, CaptureRules, Env, Plan, WorkerConfig
from specdecode_worker.engine.client import EngineClient
from specdecode_worker.engine.process import EngineWatchdog, State
from specdecode_worker.server.access import Scope
from specdecode_worker.server.errors import CannotStart
from specdecode_worker.server.lifecycle import Lifecycle
from specdecode_worker.termination import write_termination_message

log = logging.getLogger(__name__)

# Watch over the engine process: probes fail while it makes no progress, and a hung engine is killed.

_POLL_SECONDS = 0.1


async def watch_engine(engine: EngineClient, lifecycle: Lifecycle, step_timeout_seconds: float) -> None:
    """Watch the engine until it ends. A suspect engine makes the worker unready; a hung engine is killed."""
    watchdog = EngineWatchdog(step_timeout_seconds)
    while not engine.ended.done():
        assessment = watchdog.observe(engine.heartbeat, time.monotonic())
        if assessment.state is State.HUNG:
            await _end_hung_engine(engine, lifecycle, f"the engine hangs: {assessment}")
            return
        suspicion = str(assessment) if assessment.state is State.SUSPECT else ""
        if bool(suspicion) != bool(lifecycle.suspicion):
            log.warning(
                "not ready, the engine makes %s" if suspicion else "the engine makes progress again%s", suspicion
            )
        lifecycle.suspicion = suspicion
        await asyncio.sleep(_POLL_SECONDS)


async def _end_hung_engine(engine: EngineClient, lifecycle: Lifecycle, reason: str) -> None:
    """Fail the probes, write the facts and the engine's stacks, and kill the engine, which ends every stream.

    The stacks go to the log and the termination message only, because clients must not see them.
    """
    lifecycle.fail(reason)
    log.error("%s", reason)
    stacks = await engine.stacks()
    log.error("%s", stacks)
    write_termination_message(f"{reason}\n{stacks}")
    engine.kill(reason)


# Deadline for the end of the server process, which busy threads would otherwise delay.
#
# The interpreter waits for the threads of its executors before it exits. A thread that tokenizes a long text, or an
# engine process that waits for its device in the kernel, can take minutes.


class ExitDeadline:
    """Deadline after which the process ends with ``code``, whatever its threads do. It is not set at first."""

    def __init__(self) -> None:
        self.code = 1
        self._deadline_seconds = float("inf")
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._wait, name="exit deadline", daemon=True)

    def set(self, seconds: float) -> None:
        """End the process ``seconds`` from now. An earlier deadline stays in force."""
        with self._changed:
            self._deadline_seconds = min(self._deadline_seconds, time.monotonic() + seconds)
            self._changed.notify()
        if not self._thread.is_alive():
            self._thread.start()

    @property
    def left_seconds(self) -> float:
        """Time until the deadline."""
        return self._deadline_seconds - time.monotonic()

    def _wait(self) -> None:
        with self._changed:
            while (left := self.left_seconds) > 0:
                self._changed.wait(left)
        with contextlib.suppress(OSError, ValueError):
            print("the process ends at its deadline; a thread was still busy", file=sys.stderr, flush=True)
        os._exit(self.code)


# Capture recorder of the server process: its start and end.

_CLOSE_SECONDS = 2.0
"""Time for the thread to write what it holds. It runs while the engine ends."""


def open_recorder(config: WorkerConfig, plan: Plan) -> Recorder | None:
    """Open the capture recorder with the rules of the configuration, else with those of the plan.

    Returns None without a folder for either.

    Raises:
        CannotStart: The folder or the hook of the configuration cannot be used. Problems of the plan's rules, and all
            that arise later, are in the worker's report.
    """
    read_token = _operator_token(config.server.admin_tokens_path)
    if config.capture is not None:
        try:
            return _configured(config.capture, read_token)
        except CaptureError as error:
            raise CannotStart(f"capture: {error}") from None
    if config.capture_dir is not None:
        return Recorder(Path(config.capture_dir), plan.capture, read_token=read_token)
    if plan.capture is not None:
        log.warning("the plan switches capture on, but this worker has no folder for it (capture_dir)")
    return None


def _configured(config: CaptureConfig, read_token: Callable[[], str | None]) -> Recorder:
    """Open the recorder of the configuration. Raise CaptureError if its folder or its hook cannot be used."""
    folder = Path(config.dir)
    if config.redact is not None:
        load_hook(config.redact)
    SegmentWriter(folder, max_bytes=config.max_bytes, max_age_seconds=config.max_age_seconds)
    return Recorder(folder, CaptureRules(**config.model_dump(exclude={"dir"})), read_token=read_token)


def _operator_token(folder: str | None) -> Callable[[], str | None]:
    """Return the reader of the current admin token with the scope operator; it returns None without one."""
    given = os.environ.get(Env.admin_token, "").strip() or None

    def read() -> str | None:
        if folder is not None:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                lines = (Path(folder) / Scope.operator).read_text().split()
                if lines:
                    return lines[0]
        return given

    return read


async def close_recorder(recorder: Recorder | None) -> None:
    """Close the recorder in a thread of its own: those of the event loop may all be busy."""
    if recorder is None:
        return
    executor = ThreadPoolExecutor(1)
    await asyncio.get_running_loop().run_in_executor(executor, recorder.close, _CLOSE_SECONDS)
    executor.shutdown(wait=False)


# Vital parts of the server process: tasks and threads whose failure ends the worker.


class VitalParts:
    """Tasks that must live as long as the worker. ``failed`` resolves with the reason of the first failure."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._started: list[asyncio.Task[None]] = []

    def start(self, name: str, work: Coroutine[object, object, None]) -> None:
        """Run ``work`` as a vital task, until it ends or `stop` cancels it."""
        task = asyncio.create_task(work)
        self._started.append(task)
        self.watch(name, task)

    def watch(self, name: str, task: asyncio.Task[None]) -> None:
        """Treat an exception in ``task`` as the failure of the worker."""
        task.add_done_callback(lambda ended: self._ended(name, ended))

    async def stop(self) -> None:
        """Cancel the tasks that `start` started."""
        for task in self._started:
            task.cancel()
        await asyncio.gather(*self._started, return_exceptions=True)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("the %s failed", name, exc_info=error)
        if not self.failed.done():
            self.failed.set_result(f"the {name} failed: {type(error).__name__}: {error}")
