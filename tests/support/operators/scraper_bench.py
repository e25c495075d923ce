"""A scraper over workers on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdecode_operator.state.deployment_state import DeploymentState, Readings, StateTable
from specdecode_operator.state.packed import Packed
from specdecode_operator.telemetry.scrape_round import ScrapeLimits, WorkerAccess
from specdecode_operator.telemetry.scraper import RoundTimes, Scraper
from specdecode_operator.telemetry.worker_client import WorkerClient
from specdecode_operator.telemetry.worker_poll import Target
from specdecode_operator.types import Key
from support.operators.socket_workers import Behaviour, SocketWorkers, socket_workers

KEY = ("ns", "demo")
PERIOD_SECONDS = 0.4


@dataclass
class Bench:
    """A scraper over workers on sockets, with the calls that it makes."""

    workers: SocketWorkers
    client: WorkerClient
    period: float = PERIOD_SECONDS
    limits: ScrapeLimits = field(default_factory=ScrapeLimits)
    table: StateTable = field(default_factory=StateTable)
    targets: dict[Key, list[Target]] = field(default_factory=dict)
    tokens: tuple[str, ...] = ("secret",)
    notified: list[Key] = field(default_factory=list)
    unauthorized: list[Key] = field(default_factory=list)
    times: dict[Key, list[RoundTimes]] = field(default_factory=dict)
    guard: Callable[[], float | None] = lambda: None
    notify_error: Exception | None = None
    scraper: Scraper = field(init=False)

    def __post_init__(self) -> None:
        self.scraper = Scraper(
            self.table,
            self.client,
            targets=self._targets,
            access=lambda state: WorkerAccess(tokens=self.tokens),
            notify=self._notify,
            poll_seconds=self.period,
            limits=self.limits,
            guard=lambda: self.guard(),
            on_unauthorized=self.unauthorized.append,
            on_round=lambda key, times: self.times.setdefault(key, []).append(times),
        )

    async def add(self, *behaviours: Behaviour, key: Key = KEY) -> list[Target]:
        """Add workers to a deployment, which becomes known with the first of them."""
        added = []
        for behaviour in behaviours:
            number = len(self.targets.setdefault(key, []))
            address = await self.workers.add(behaviour)
            added.append(Target(uid=f"{key[1]}-{number}", name=f"{key[1]}-pod-{number}", address=address, ready=True))
            self.targets[key].append(added[-1])
        if self.table.get(key) is None:
            self.table.put(key, DeploymentState(resource=Packed.of(resource_of(key)), generation=1))
        return added

    def readings(self, key: Key = KEY) -> Readings:
        state = self.table.get(key)
        assert state is not None
        return state.readings

    def problems(self, key: Key = KEY) -> list[str | None]:
        """Return the problem of every worker, in the order of the targets."""
        return [self.readings(key).by_uid[target.uid].problem for target in self.targets[key]]

    async def rounds(self, count: int = 1, key: Key = KEY) -> None:
        """Wait for so many rounds from now on."""
        last = self.readings(key).round + count
        await self.until(lambda: self.readings(key).round >= last)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)

    def _targets(self, key: Key) -> Sequence[Target]:
        return self.targets[key]

    def _notify(self, key: Key) -> None:
        if self.notify_error:
            raise self.notify_error
        self.notified.append(key)


def resource_of(key: Key, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": key[0], "name": key[1], "uid": "u"}, "spec": spec}


@contextlib.asynccontextmanager
async def bench_of(*, deadline: float = 10, **fields: Any) -> AsyncIterator[Bench]:
    """Return a bench whose scraper runs until the end of the block."""
    async with socket_workers() as workers:
        client = WorkerClient(timeout_seconds=deadline)
        bench = Bench(workers, client, **fields)
        running = asyncio.create_task(bench.scraper.run())
        try:
            yield bench
        finally:
            assert not running.done(), "the loop survives everything"
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await client.close()
