"""Worker lifecycle: its states, the probes that depend on them, and the drain at shutdown.

    LOADING -> SERVING -> LEAVING -> DRAINING        FAILED can follow every state
    /health: all but FAILED.  /ready: SERVING, unless the engine is suspect.  New requests: SERVING and LEAVING.

In LEAVING, the worker waits until the Service endpoints no longer contain this pod: it still serves new requests, and
asks each client to close its connection. In DRAINING, it refuses new requests while the running requests finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from enum import Enum, auto

from specdecode_worker.contract import ServerConfig
from specdecode_worker.server.errors import Unavailable

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
