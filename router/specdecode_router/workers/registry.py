"""Table of the workers: addresses from discovery, streams of this router, and what loads and failures say."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from specdecode_router.workers.router_share import RouterShare
from specdecode_router.workers.step_speeds import StepSpeeds, StepSums
from specdecode_router.workers.worker import Endpoint, WorkerView
from specdecode_worker.contract.internal_stream import WorkerLoad

log = logging.getLogger(__name__)

_MAX_COOLDOWN_FACTOR = 8
"""Longest cooldown of a worker that fails again and again, as a multiple of the first one."""

_FAILURES_OF_A_LOST_WORKER = 3
"""Failures in a row after which a worker gets no requests until its report is read again."""
_LEAST_PREPARED = 2
_TURN_SECONDS = 0.5
"""Time after which another router may borrow the places that cannot be divided."""


@dataclass(slots=True)
class WorkerState:
    """State of one worker, as far as the router knows it."""

    endpoint: Endpoint
    streams: Counter[str]
    """Streams of this router on the worker, by tenant."""
    load: WorkerLoad | None = None
    """Last load; None while unknown."""
    own: Counter[str] = field(default_factory=Counter)
    """Most of ``streams`` at the last two loads, so that the two can be compared with ``clients``."""
    clients: Counter[str] = field(default_factory=Counter)
    """Most requests of each tenant at the last two loads, of all routers.

    One load alone is wrong in the moment between the end of a stream and the start of the next one in its place.
    """
    last_own: Counter[str] = field(default_factory=Counter)
    last_clients: Counter[str] = field(default_factory=Counter)
    compatibility_key: str = ""
    draining: bool = False
    suspect_until: float = 0.0
    failures: int = 0
    """Failures since the last answer."""


class WorkerRegistry:
    """Workers by name. All methods are called on the event loop."""

    def __init__(
        self,
        clock: Callable[[], float],
        cooldown_seconds: float = 1.0,
        router: str = "",
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Start without workers.

        Args:
            clock: Monotonic clock in seconds.
            cooldown_seconds: Time for which a worker is avoided after a failure.
            router: Name of this router among those that share the workers.
            wall_clock: Seconds since the epoch, roughly the same at all routers.
        """
        self._clock, self._cooldown_seconds, self._wall_clock = clock, cooldown_seconds, wall_clock
        self._router = router
        self._workers: dict[str, WorkerState] = {}
        self._streams: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Streams by worker and tenant, also on workers that discovery has dropped: they may return."""
        self._silent: Counter[str] = Counter()
        """Streams whose frames have stopped, by worker."""
        self._speeds = StepSpeeds(clock)
        self._waiters: set[asyncio.Future[None]] = set()
        self.on_change: Callable[[], None] = lambda: None
        """Called when workers or their capacity changed."""
        self.on_leave: Callable[[str], None] = lambda name: None
        """Called with the name of a worker that is gone."""
        self.has_share: Callable[[str], bool] = lambda deployment: True
        """Returns whether the workers of a deployment get requests; the places of others do not count."""
        self._stranded: dict[object, float] = {}
        """Requests that have lost their worker and find no other one, by the time since which they wait."""

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the addresses. A worker that stays keeps its state."""
        known = self._workers
        self._workers = {}
        for one in endpoints:
            state = self._workers[one.name] = known.get(one.name) or WorkerState(one, self._streams[one.name])
            state.endpoint = one
        self._speeds.retain(self._workers.keys())
        for name in known.keys() - self._workers.keys():
            self.on_leave(name)
        for name in [name for name, streams in self._streams.items() if not streams and name not in self._workers]:
            del self._streams[name]
        if known.keys() != self._workers.keys():
            log.info("%d workers: %s", len(self._workers), ", ".join(sorted(self._workers)) or "none")
        self._notify()

    @property
    def endpoints(self) -> list[Endpoint]:
        """Addresses of all workers."""
        return [state.endpoint for state in self._workers.values()]

    @property
    def capacity(self) -> int:
        """Requests that this router may have on the workers: its share of their places, and what it may borrow."""
        by_routers: dict[tuple[str, ...], list[WorkerState]] = {}
        apart = 0  # requests that still run where no further ones go
        for state in filter(_accepts, self._workers.values()):
            if self.has_share(state.endpoint.deployment):
                by_routers.setdefault(_routers(state), []).append(state)
            else:
                apart += state.streams.total()
        return (apart if by_routers else 0) + sum(
            self._share_among(routers).places(
                sum(map(_places, states)),
                lendable=sum(map(_lendable, states)),
                own=sum(state.own.total() for state in states),
                used=sum(map(_requests, states)),
            )
            for routers, states in by_routers.items()
        )

    def tenant_limit(self, tenant: str, limit: int) -> int:
        """Return the requests that a tenant with a limit for all routers may have at this one."""
        states = list(filter(_accepts, self._workers.values()))
        routers = sorted({router for state in states for router in _routers(state)})
        own = sum(state.own[tenant] for state in states)
        used = sum(max(state.own[tenant], state.clients[tenant]) for state in states)
        # As of the workers' places, a fifth is not lent: else every pause between two requests would be.
        return self._share_among(tuple(routers)).places(limit, lendable=limit - limit // 5, own=own, used=used)

    @property
    def has_free_rows(self) -> bool:
        """True if the workers had fewer requests than rows in their batches at their last loads."""
        workers = filter(_accepts, self._workers.values())
        states = [one for one in workers if self.has_share(one.endpoint.deployment)]
        return sum(map(_requests, states)) < sum(map(_lendable, states))

    def is_settled(self, name: str) -> bool:
        """Return whether a worker knows all of its routers."""
        state = self._workers.get(name)
        return state is not None and state.load is not None and state.load.settled

    def counts(self) -> dict[str, int]:
        """Return the number of workers by state: those that are avoided, silent or out of reach, are suspect."""
        states = self._workers.values()
        accepting = [state for state in states if not (state.draining or state.endpoint.terminating)]
        suspect = sum(self._is_suspect(state) or not _accepts(state) for state in accepting)
        return {
            "ready": len(accepting) - suspect,
            "suspect": suspect,
            "terminating": len(states) - len(accepting),
        }

    def views(self) -> list[WorkerView]:
        """Return the workers that accept new streams."""
        return [self._view(state) for state in self._workers.values() if _accepts(state)]

    def begin_stream(self, name: str, tenant: str) -> None:
        """Count a stream of this router on a worker."""
        self._streams[name][tenant] += 1

    def end_stream(self, name: str, tenant: str) -> None:
        """Count the end of a stream."""
        self._streams[name] -= Counter((tenant,))

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
        self._silent[name] += 1

    def end_silence(self, name: str) -> None:
        """Count a stream whose frames go on, or that has ended."""
        self._silent -= Counter((name,))

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

    def record_load(self, name: str, load: WorkerLoad) -> None:
        """Record a load: requests, capacity, routers, model, tasks, step times, and the key where it has one."""
        if (state := self._workers.get(name)) is None:
            return
        known = state.load
        appeared = known is None or known.max_num_seqs != load.max_num_seqs or state.draining != load.draining
        appeared = appeared or state.failures > 0
        state.load, state.draining = load, load.draining
        own, clients = state.streams.copy(), Counter(load.clients)
        state.own, state.clients = own | state.last_own, clients | state.last_clients
        state.last_own, state.last_clients = own, clients
        state.failures, state.suspect_until = 0, 0.0
        if load.steps:
            self._speeds.record(
                name,
                {
                    (one.tokens_bucket, one.draft_passes, one.prefill, one.context_bucket): StepSums(
                        one.count, one.seconds
                    )
                    for one in load.steps
                },
            )
        if load.compatibility_key:
            state.compatibility_key = load.compatibility_key
        if appeared:
            self._notify()
        else:
            self.on_change()

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

    def _share_among(self, routers: tuple[str, ...]) -> RouterShare:
        """Return the share of this router. A worker that does not know it yet has it as one more."""
        names = sorted({*routers, self._router})
        return RouterShare(len(names), names.index(self._router), turn=int(self._wall_clock() / _TURN_SECONDS))

    def _is_suspect(self, state: WorkerState) -> bool:
        return self._silent[state.endpoint.name] > 0 or self._clock() < state.suspect_until

    def _view(self, state: WorkerState) -> WorkerView:
        load = state.load
        return WorkerView(
            endpoint=state.endpoint,
            in_flight=state.streams.total(),
            requests=_estimated_requests(state),
            max_num_seqs=_rows(state),
            compatibility_key=state.compatibility_key,
            model="" if load is None else load.model,
            plan_tasks=() if load is None else load.tasks,
            speed=self._speeds.of(state.endpoint.name),
            suspect=self._is_suspect(state),
        )


def _accepts(state: WorkerState) -> bool:
    lost = state.failures >= _FAILURES_OF_A_LOST_WORKER
    return not (state.draining or state.endpoint.terminating or lost)


def _rows(state: WorkerState) -> int:
    """Return the largest batch of a worker; 0 while unknown."""
    return 0 if state.load is None else state.load.max_num_seqs


def _lendable(state: WorkerState) -> int:
    """Return the rows of a worker that routers may borrow: those of its batch, once it knows all routers."""
    return _rows(state) if state.load is not None and state.load.settled else 0


def _places(state: WorkerState) -> int:
    """Return the batch of a worker and a quarter more: those are prepared while the batch is full.

    A new worker counts as a small one until it knows all routers that share it.
    """
    if state.load is None or not state.load.settled:
        return _LEAST_PREPARED
    return state.load.max_num_seqs + max(state.load.max_num_seqs // 4, _LEAST_PREPARED)


def _requests(state: WorkerState) -> int:
    """Return the requests on a worker at its last loads: at least those of this router."""
    return max(state.own.total(), state.clients.total())


def _estimated_requests(state: WorkerState) -> int:
    """Return the requests on a worker now, if the other routers have done as this one since its last load.

    Else all routers would choose the worker that was the emptiest at its last load.
    """
    change = state.streams.total() - state.last_own.total()
    return max(state.last_clients.total() + change * max(len(_routers(state)), 1), 0)


def _routers(state: WorkerState) -> tuple[str, ...]:
    return () if state.load is None else state.load.routers
