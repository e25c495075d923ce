"""Table of the workers: addresses from discovery, streams of this router, and what reports and failures say."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from specdecode_router.workers.step_speeds import StepKind, StepSpeeds, StepSums
from specdecode_router.workers.worker import Endpoint, PlanTask, WorkerView

log = logging.getLogger(__name__)

_MAX_COOLDOWN_FACTOR = 8
"""Longest cooldown of a worker that fails again and again, as a multiple of the first one."""

_FAILURES_OF_A_LOST_WORKER = 3
"""Failures in a row after which a worker gets no requests until its report is read again."""
_LEAST_PREPARED = 2


@dataclass(slots=True)
class WorkerState:
    """State of one worker, as far as the router knows it."""

    endpoint: Endpoint
    in_flight: int = 0
    reported_requests: int = 0
    max_num_seqs: int = 0
    model: str = ""
    compatibility_key: str = ""
    plan_tasks: tuple[PlanTask, ...] = ()
    draining: bool = False
    silent_streams: int = 0
    """Streams whose frames have stopped."""
    suspect_until: float = 0.0
    failures: int = 0
    """Failures since the last answer."""


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """Number of workers in each state."""

    ready: int
    suspect: int
    """Workers that are avoided: they are silent, or could not be reached."""
    terminating: int


class WorkerRegistry:
    """Workers by name. All methods are called on the event loop."""

    def __init__(self, clock: Callable[[], float], cooldown_seconds: float = 1.0) -> None:
        self._clock, self._cooldown_seconds = clock, cooldown_seconds
        self._workers: dict[str, WorkerState] = {}
        self._speeds = StepSpeeds(clock)
        self._waiters: set[asyncio.Future[None]] = set()
        self.on_change: Callable[[], None] = lambda: None
        """Called when workers or their capacity changed."""
        self.on_leave: Callable[[str], None] = lambda name: None
        """Called with the name of a worker that is gone."""
        self._stranded: dict[object, float] = {}
        """Requests that have lost their worker and find no other one, by the time since which they wait."""

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the addresses. A worker that stays keeps its state."""
        known = self._workers
        self._workers = {one.name: known.get(one.name) or WorkerState(one) for one in endpoints}
        for one in endpoints:
            self._workers[one.name].endpoint = one
        self._speeds.retain(self._workers.keys())
        for name in known.keys() - self._workers.keys():
            self.on_leave(name)
        if known.keys() != self._workers.keys():
            log.info("%d workers: %s", len(self._workers), ", ".join(sorted(self._workers)) or "none")
        self._notify()

    @property
    def endpoints(self) -> list[Endpoint]:
        """Addresses of all workers."""
        return [state.endpoint for state in self._workers.values()]

    @property
    def capacity(self) -> int:
        """Requests that the workers should have at a time. A worker without a report yet counts as a small one."""
        return sum(_places(state) for state in self._workers.values() if _accepts(state))

    def counts(self) -> WorkerCounts:
        """Return the number of workers in each state."""
        states = self._workers.values()
        leaving = sum(state.draining or state.endpoint.terminating for state in states)
        accepting = [state for state in states if not (state.draining or state.endpoint.terminating)]
        suspect = sum(self._is_suspect(state) or not _accepts(state) for state in accepting)
        return WorkerCounts(len(accepting) - suspect, suspect, leaving)

    def views(self) -> list[WorkerView]:
        """Return the workers that accept new streams."""
        return [self._view(state) for state in self._workers.values() if _accepts(state)]

    def begin_stream(self, name: str) -> None:
        """Count a stream of this router on a worker."""
        if state := self._workers.get(name):
            state.in_flight += 1

    def end_stream(self, name: str) -> None:
        """Count the end of a stream."""
        if state := self._workers.get(name):
            state.in_flight = max(state.in_flight - 1, 0)

    def record_failure(self, name: str) -> None:
        """Avoid a worker for a moment: longer with every failure without an answer in between."""
        if state := self._workers.get(name):
            factor = min(2**state.failures, _MAX_COOLDOWN_FACTOR)
            state.failures += 1
            state.suspect_until = self._clock() + factor * self._cooldown_seconds
            if state.failures == _FAILURES_OF_A_LOST_WORKER:
                self.on_change()

    def record_silence(self, name: str) -> None:
        """Count a stream whose frames have stopped."""
        if state := self._workers.get(name):
            state.silent_streams += 1

    def end_silence(self, name: str) -> None:
        """Count a stream whose frames go on, or that has ended."""
        if state := self._workers.get(name):
            state.silent_streams = max(state.silent_streams - 1, 0)

    def record_key(self, name: str, key: str) -> None:
        """Record the compatibility key of a worker, from a stream's ``Open``. It proves that the worker answers."""
        if state := self._workers.get(name):
            was_lost = not _accepts(state)
            state.compatibility_key, state.failures, state.suspect_until = key, 0, 0.0
            if was_lost:
                self._notify()

    def record_draining(self, name: str) -> None:
        """Record that a worker gives its streams away and takes no new ones."""
        if state := self._workers.get(name):
            state.draining = True
            self.on_change()

    def record_report(
        self,
        name: str,
        *,
        requests: int,
        max_num_seqs: int,
        draining: bool,
        compatibility_key: str | None,
        model: str = "",
        plan_tasks: tuple[PlanTask, ...] = (),
        steps: Mapping[StepKind, StepSums] | None = None,
    ) -> None:
        """Record a report: load, capacity, model, tasks, step times, and the key where the report has one."""
        if (state := self._workers.get(name)) is None:
            return
        changed = (state.max_num_seqs, state.draining) != (max_num_seqs, draining) or state.failures > 0
        state.reported_requests, state.max_num_seqs, state.draining = requests, max_num_seqs, draining
        state.model, state.plan_tasks = model, plan_tasks
        state.failures, state.suspect_until = 0, 0.0
        if steps:
            self._speeds.record(name, steps)
        if compatibility_key:
            state.compatibility_key = compatibility_key
        if changed:
            self._notify()

    @contextlib.contextmanager
    def stranded_request(self) -> Iterator[None]:
        """Count a request that finds no worker while the block runs."""
        request = object()
        self._stranded[request] = self._clock()
        try:
            yield
        finally:
            del self._stranded[request]

    @property
    def demand(self) -> tuple[int, float]:
        """Number of requests that wait while no worker accepts any, and seconds for which the oldest has waited.

        Requests in the queue are not counted here.
        """
        if self.capacity or not self._stranded:
            return 0, 0.0
        return len(self._stranded), self._clock() - min(self._stranded.values())

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until a worker appears or answers again, for at most ``seconds``."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait((waiter,), timeout=seconds)
        finally:
            self._waiters.discard(waiter)

    def _notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.on_change()

    def _is_suspect(self, state: WorkerState) -> bool:
        return state.silent_streams > 0 or self._clock() < state.suspect_until

    def _view(self, state: WorkerState) -> WorkerView:
        return WorkerView(
            endpoint=state.endpoint,
            in_flight=state.in_flight,
            reported_requests=state.reported_requests,
            max_num_seqs=state.max_num_seqs,
            compatibility_key=state.compatibility_key,
            model=state.model,
            plan_tasks=state.plan_tasks,
            speed=self._speeds.of(state.endpoint.name),
            suspect=self._is_suspect(state),
        )


def _accepts(state: WorkerState) -> bool:
    lost = state.failures >= _FAILURES_OF_A_LOST_WORKER
    return not (state.draining or state.endpoint.terminating or lost)


def _places(state: WorkerState) -> int:
    """Return the batch of a worker and a quarter more: those are prepared while the batch is full."""
    return state.max_num_seqs + max(state.max_num_seqs // 4, _LEAST_PREPARED)
