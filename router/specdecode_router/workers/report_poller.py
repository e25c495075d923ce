"""Polling of the workers' reports: load, capacity, draining and compatibility key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec

from specdecode_router.workers.client import WorkerClient
from specdecode_router.workers.registry import WorkerRegistry
from specdecode_router.workers.worker import Endpoint
from specdecode_worker.contract import Route

log = logging.getLogger(__name__)

_FIRST_SECONDS = 0.2
"""Interval until every worker has answered once."""


class _Report(msgspec.Struct):
    """Fields of a report that the router reads. The others are skipped without being built."""

    running: int = 0
    waiting: int = 0
    max_num_seqs: int = 1
    draining: bool = False
    compatibility_key: str | None = None


class ReportPoller:
    """Reads the reports of all workers every few seconds, all at once and each within a deadline."""

    def __init__(
        self,
        registry: WorkerRegistry,
        client: WorkerClient,
        seconds: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._registry, self._client, self._seconds, self._sleep = registry, client, seconds, sleep
        self._decoder = msgspec.json.Decoder(_Report)
        self._answered: set[str] = set()
        self._reading: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Poll until cancelled."""
        try:
            while True:
                self.poll()
                names = {one.name for one in self._registry.endpoints}
                await self._sleep(self._seconds if names and names <= self._answered else _FIRST_SECONDS)
        finally:
            for task in self._reading.values():
                task.cancel()

    def poll(self) -> None:
        """Begin to read every report that is not being read already."""
        self._reading = {name: task for name, task in self._reading.items() if not task.done()}
        for endpoint in self._registry.endpoints:
            if endpoint.name not in self._reading:
                self._reading[endpoint.name] = asyncio.create_task(self._read(endpoint))

    async def _read(self, endpoint: Endpoint) -> None:
        name = endpoint.name
        try:
            status, body = await self._client.get(endpoint.admin_url, Route.report, self._seconds)
            if status != 200:
                raise ValueError(f"status {status}")
            report = self._decoder.decode(body)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
            if name in self._answered:
                log.warning("worker %s: no report: %s", name, str(error) or type(error).__name__)
            self._answered.discard(name)
            self._registry.record_failure(name)
            return
        self._answered.add(name)
        self._registry.record_report(
            name,
            requests=report.running + report.waiting,
            max_num_seqs=report.max_num_seqs,
            draining=report.draining,
            compatibility_key=report.compatibility_key,
        )
