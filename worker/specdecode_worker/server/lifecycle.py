"""Worker lifecycle: its states, the probes that depend on them, the drain at shutdown, and the ends by a failure.

    LOADING -> SERVING -> LEAVING -> DRAINING        FAILED can follow every state
    /health: all but FAILED.  /ready: SERVING, unless the engine is suspect.  New requests: SERVING and LEAVING.

In LEAVING, the worker waits until the Service endpoints no longer contain this pod: it still serves new requests, and
asks each client to close its connection. In DRAINING, it refuses new requests while the running requests finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from enum import Enum, auto

from specdecode_worker.contract import ServerConfig
from specdecode_worker.engine.client import EngineClient
from specdecode_worker.engine.process import EngineWatchdog, State
from specdecode_worker.server.errors import Unavailable
from specdecode_worker.termination import write_termination_message

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.05


class LifecycleState(Enum):
    """Lifecycle state of a worker, in the order in which a worker goes through them."""

    LOADING = auto()
    SERVING = auto()
    LEAVING = auto()
    DRAINING = auto()
    FAILED = auto()


class Lifecycle:
    """Current lifecycle state of a worker. A change to an earlier state is ignored."""

    def __init__(self) -> None:
        self.state = LifecycleState.LOADING
        self.failure = ""
        """Reason of the first failure; empty without a failure."""
        self.suspicion = ""
        """Reason why the engine may hang; empty while it makes progress."""
        self.on_leave: set[Callable[[], None]] = set()
        """Functions to call when the worker begins to leave. They must not raise."""

    def serve(self) -> None:
        """Change to SERVING: the model is loaded."""
        self._advance(LifecycleState.SERVING)

    def leave(self) -> None:
        """Change to LEAVING: not ready, but still serving new requests. Requests of routers move to other workers."""
        self._advance(LifecycleState.LEAVING)
        for notify in tuple(self.on_leave):
            notify()

    def drain(self) -> None:
        """Change to DRAINING: new requests are refused."""
        self._advance(LifecycleState.DRAINING)

    def fail(self, reason: str) -> None:
        """Change to FAILED. The first reason is kept."""
        self.failure = self.failure or reason
        self._advance(LifecycleState.FAILED)

    @property
    def healthy(self) -> bool:
        """True in every state except FAILED."""
        return self.state is not LifecycleState.FAILED

    @property
    def ready(self) -> bool:
        """True in SERVING only, and only while the engine makes progress."""
        return self.state is LifecycleState.SERVING and not self.suspicion

    @property
    def readiness(self) -> str:
        """State in lower case, with the suspicion if there is one."""
        name = self.state.name.lower()
        return f"{name}, but the engine makes {self.suspicion}" if self.suspicion else name

    @property
    def shutting_down(self) -> bool:
        """True in LEAVING and DRAINING."""
        return self.state in (LifecycleState.LEAVING, LifecycleState.DRAINING)

    def check_accepting(self) -> None:
        """Raise Unavailable unless the worker accepts new requests."""
        match self.state:
            case LifecycleState.LOADING:
                raise Unavailable("the model is still loading", code="loading")
            case LifecycleState.DRAINING:
                raise Unavailable("this worker is shutting down", code="draining")
            case LifecycleState.FAILED:
                raise Unavailable(f"this worker has failed: {self.failure}", code="engine_gone")
            case _:
                return

    def _advance(self, state: LifecycleState) -> None:
        if state.value > self.state.value:
            self.state = state


class GracefulShutdown:
    """Graceful shutdown of a worker. It starts once, at the first call of ``begin``; ``exit_now`` ends all waiting."""

    def __init__(
        self, lifecycle: Lifecycle, config: ServerConfig, running: Callable[[], int], exit_now: asyncio.Event
    ) -> None:
        self._lifecycle = lifecycle
        self._delay_seconds = config.endpoint_delay_seconds
        self._grace_seconds = config.grace_period_seconds
        self._running = running
        self._exit_now = exit_now
        self._drained: asyncio.Task[int] | None = None
        self.begun = asyncio.Event()

    def begin(self) -> asyncio.Task[int]:
        """Start the shutdown if it has not started, and return its task.

        Returns:
            The task; its result is the number of requests that are still running at the end of the drain.
        """
        if self._drained is None:
            # A worker that was never ready is in no endpoint list, so there is no removal to wait for.
            delay_seconds = self._delay_seconds if self._lifecycle.state is LifecycleState.SERVING else 0.0
            self._lifecycle.leave()
            self._drained = asyncio.create_task(self._drain(delay_seconds))
            self.begun.set()
        return self._drained

    async def _drain(self, delay_seconds: float) -> int:
        await self._pause(delay_seconds)
        self._lifecycle.drain()
        began = time.monotonic()
        while self._running() and not self._exit_now.is_set() and time.monotonic() - began < self._grace_seconds:
            await self._pause(_TICK_SECONDS)
        return self._running()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exit_now.wait(), seconds)


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
