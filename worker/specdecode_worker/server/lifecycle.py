"""The states of a worker, and what each means for those who ask.

    LOADING -> SERVING -> LEAVING -> DRAINING        FAILED, from anywhere
    health: all but FAILED.  ready: SERVING alone.  new requests: SERVING and LEAVING.

LEAVING is the time in which endpoints forget this pod: requests still come and are served, each connection asked to
close. DRAINING refuses new requests while running ones finish.
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


class State(Enum):
    LOADING = auto()
    SERVING = auto()
    LEAVING = auto()
    DRAINING = auto()
    FAILED = auto()


class Lifecycle:
    """Moves forward only."""

    def __init__(self) -> None:
        self.state = State.LOADING
        self.failure = ""

    def serve(self) -> None:
        self._advance(State.SERVING)

    def leave(self) -> None:
        self._advance(State.LEAVING)

    def drain(self) -> None:
        self._advance(State.DRAINING)

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self._advance(State.FAILED)

    @property
    def healthy(self) -> bool:
        return self.state is not State.FAILED

    @property
    def ready(self) -> bool:
        return self.state is State.SERVING

    @property
    def leaving(self) -> bool:
        return self.state in (State.LEAVING, State.DRAINING)

    def check_accepting(self) -> None:
        """Raises Unavailable unless new requests are taken."""
        match self.state:
            case State.LOADING:
                raise Unavailable("the model is still loading", code="loading")
            case State.DRAINING:
                raise Unavailable("this worker is shutting down", code="draining")
            case State.FAILED:
                raise Unavailable(f"the engine is gone: {self.failure}", code="engine_gone")
            case _:
                return

    def _advance(self, state: State) -> None:
        if state.value > self.state.value:
            self.state = state


class Departure:
    """The way out, once, however often it is asked for. ``hurried`` ends the waiting."""

    def __init__(
        self, lifecycle: Lifecycle, config: ServerConfig, running: Callable[[], int], hurried: asyncio.Event
    ) -> None:
        self._lifecycle = lifecycle
        self._delay_seconds = min(config.endpoint_delay_seconds, config.grace_period_seconds)
        self._grace_seconds = config.grace_period_seconds
        self._running = running
        self._hurried = hurried
        self._drained: asyncio.Task[int] | None = None

    def begin(self) -> asyncio.Task[int]:
        """Starts to leave. The task's result is the number of requests that were still running at its end."""
        if self._drained is None:
            # Nobody was sent to a worker that never was ready.
            delay_seconds = self._delay_seconds if self._lifecycle.ready else 0.0
            self._lifecycle.leave()
            self._drained = asyncio.create_task(self._drain(delay_seconds))
        return self._drained

    async def _drain(self, delay_seconds: float) -> int:
        began = time.monotonic()
        await self._pause(delay_seconds)
        self._lifecycle.drain()
        while self._running() and not self._hurried.is_set() and time.monotonic() - began < self._grace_seconds:
            await self._pause(_TICK_SECONDS)
        return self._running()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurried.wait(), seconds)
