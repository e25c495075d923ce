"""The fleet under a trace: pods come and go, requests arrive, and a controller looks in every few seconds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from specdecode_simulator.records.acceptance_walks import rounded
from specdecode_simulator.records.recordings import Library
from specdecode_simulator.traces.job import Job
from specdecode_simulator.traces.trace import Trace, demand
from specdecode_simulator.world.counters import Counters, Names, UnreadCounters
from specdecode_simulator.world.segment import Pilot
from specdecode_simulator.world.truth import Truth
from specdecode_simulator.world.worker import Worker

POLL_SECONDS = 5.0
TRIES = 3
"""A client that gives up asks again, at most so often in all."""
_WEATHER_SECONDS = 30.0
_WEATHER = 0.02
"""Standard deviation of a pod's slow drift: clocks, temperature, neighbours."""


@dataclass(slots=True)
class Pod:
    index: int
    worker: Worker
    created: float
    ready_at: float
    leaving: bool = False

    @property
    def uid(self) -> str:
        return f"pod-{self.index}"


class Controller(Protocol):
    """Whoever decides: a pilot for every new worker, and a look at the fleet every poll."""

    def pilot(self, fleet: Fleet, index: int) -> Pilot: ...

    def poll(self, fleet: Fleet, now: float) -> int | None:
        """Replicas from now on; None leaves them."""


@dataclass(slots=True)
class Fleet:
    """One run of one trace by one seed."""

    trace: Trace
    library: Library
    seed: int
    poll_seconds: float = POLL_SECONDS
    """Time between two polls of the controller."""
    is_reported: bool = True
    """Whether the controller reads the reports of workers."""
    pods: list[Pod] = field(default_factory=list)
    wanted: int = 1
    now: float = 0.0
    replica_seconds: float = 0.0
    given_up: int = 0
    retried: int = 0
    trajectory: list[int] = field(default_factory=list)
    gone: list[Worker] = field(default_factory=list)
    jobs: tuple[Job, ...] = ()
    _coins: tuple[float, ...] = ()
    _next: int = 0
    _held: list[Job] = field(default_factory=list)
    _made: int = 0

    @property
    def ready(self) -> list[Pod]:
        return [pod for pod in self.pods if not pod.leaving and pod.ready_at <= self.now]

    @property
    def staying(self) -> list[Pod]:
        return [pod for pod in self.pods if not pod.leaving]

    @property
    def workers(self) -> list[Worker]:
        """All that ever were."""
        return [*self.gone, *(pod.worker for pod in self.pods)]

    @property
    def arrivals(self) -> int:
        return self._next

    @property
    def in_flight(self) -> int:
        return sum(pod.worker.in_flight for pod in self.pods) + len(self._held)

    def truth(self, index: int) -> Truth:
        trace = self.trace
        generator = np.random.default_rng([self.seed, 77, index])
        count = int(trace.seconds / _WEATHER_SECONDS) + 3
        shocks = generator.standard_normal(count) * _WEATHER * 0.6
        weather = [0.0]
        for shock in shocks.tolist():
            weather.append(0.8 * weather[-1] + shock)
        return Truth(
            table=self.library.tables[trace.tables(index) or trace.table],
            records=self.library.records,
            quality=lambda kind, t, context: rounded(trace.kinds[kind].quality_at(t, context)),
            factor=lambda t: trace.factor(index, t) * (1 + weather[int(t / _WEATHER_SECONDS)]),
        )

    def run(self, controller: Controller) -> None:
        requests = demand(self.trace, self.library.records, self.seed)
        # Copies: a job carries its own way through this run.
        self.jobs, self._coins = tuple(replace(job) for job in requests.jobs), requests.coins
        self.wanted = self.trace.replicas
        self._populate(controller, at_once=True)
        while self.now < self.trace.seconds - 1e-9:
            end = min(self.now + self.poll_seconds, self.trace.seconds)
            self._dispatch(end)
            for pod in self.pods:
                if pod.ready_at < end:
                    pod.worker.run(end)
            self._retry()
            self.replica_seconds += len(self.pods) * (end - self.now)
            self.now = end
            wanted = controller.poll(self, end)
            self.trajectory.append(self.wanted if wanted is None else wanted)
            self._scale(self.trajectory[-1], controller)

    def _dispatch(self, end: float) -> None:
        """A Service picks a ready pod by chance; with none ready, requests are held in front of it."""
        ready = self.ready
        due = self._held
        self._held = []
        while self._next < len(self.jobs) and self.jobs[self._next].arrived < end:
            due.append(self.jobs[self._next])
            self._next += 1
        if not ready:
            self._held = due
            return
        for job in due:
            coin = (self._coins[job.id] + 0.618 * job.tries) % 1.0
            ready[int(coin * len(ready))].worker.offer(job)

    def _retry(self) -> None:
        if self.trace.patience_seconds > 1e8:
            return
        for pod in self.pods:
            for job in pod.worker.give_up(self.trace.patience_seconds):
                job.tries += 1
                if job.tries < TRIES:
                    self.retried += 1
                    self._held.append(job)
                else:
                    self.given_up += 1

    def _scale(self, wanted: int, controller: Controller) -> None:
        self.wanted = wanted
        for pod in sorted(self.staying, key=lambda pod: (pod.ready_at <= self.now, pod.worker.in_flight)):
            if len(self.staying) <= wanted:
                break
            pod.leaving = True
        for pod in [pod for pod in self.pods if pod.leaving and pod.worker.in_flight == 0]:
            self.pods.remove(pod)
            self.gone.append(pod.worker)
        self._populate(controller)

    def _populate(self, controller: Controller, *, at_once: bool = False) -> None:
        """Pods up to what is wanted and what the cluster has room for."""
        while len(self.staying) < self.wanted and len(self.pods) < self.trace.capacity(self.now):
            index, self._made = self._made, self._made + 1
            ready_at = self.now if at_once else self.now + self.trace.startup_seconds
            truth = self.truth(index)
            counting = Counters if self.is_reported else UnreadCounters
            counters = counting(self._named(), np.random.default_rng([self.seed, 78, index]))
            offset = int(np.random.default_rng([self.seed, 79, index]).integers(1 << 16))
            worker = Worker(index, truth, self.trace.limits, controller.pilot(self, index), counters, ready_at, offset)
            worker.calibrate()
            self.pods.append(Pod(index, worker, self.now, ready_at))

    def _named(self) -> Names:
        kinds = self.trace.kinds

        def tails(kind: int) -> Any:
            return self.library.records.tail_ranks(kinds[kind].domain, rounded(kinds[kind].quality(self.now)))

        return Names(self.trace.labels, tuple(kind.domain for kind in kinds), tails)
