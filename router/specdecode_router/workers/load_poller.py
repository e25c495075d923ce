"""Polling of the workers' loads: requests, capacity, routers, draining and compatibility key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp

from specdecode_router.workers.client import WorkerClient
from specdecode_router.workers.registry import WorkerRegistry
from specdecode_router.workers.worker import Endpoint
from specdecode_worker.contract.internal_stream import ROUTER_HEADER, WORKER_LOAD, WorkerLoad, decode_document

log = logging.getLogger(__name__)

_FAST_SECONDS = 0.25
"""Interval while a worker is new, or while requests wait although a worker has free rows."""


class LoadPoller:
    """Reads the loads of all workers every few seconds, all at once and each within a deadline."""

    def __init__(
        self, registry: WorkerRegistry, client: WorkerClient, seconds: float, router: str, waits: Callable[[], bool]
    ) -> None:
        """Prepare the poller.

        Args:
            registry: Table of the workers.
            client: Client of the workers.
            seconds: Interval, and deadline of each answer.
            router: Name of this router, by which workers count it.
            waits: Returns whether requests wait for a place.
        """
        self._registry, self._client, self._seconds = registry, client, seconds
        self._headers, self._waits = {ROUTER_HEADER: router}, waits
        self._answered: set[str] = set()
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._began: dict[str, float] = {}

    async def run(self) -> None:
        """Poll until cancelled."""
        try:
            while True:
                self.poll(asyncio.get_running_loop().time())
                await asyncio.sleep(min(_FAST_SECONDS, self._seconds))
        finally:
            for task in self._reading.values():
                task.cancel()

    def poll(self, now: float) -> None:
        """Begin to read every load that is due at time ``now`` and is not being read already."""
        self._reading = {name: task for name, task in self._reading.items() if not task.done()}
        hurries = self._registry.has_free_rows and self._waits()
        for endpoint in self._registry.endpoints:
            name = endpoint.name
            fast = hurries or name not in self._answered or not self._registry.is_settled(name)
            due = self._began.get(name, 0.0) + (0.0 if fast else self._seconds)
            if name not in self._reading and now >= due:
                self._began[name] = now
                self._reading[name] = asyncio.create_task(self._read(endpoint))

    async def _read(self, endpoint: Endpoint) -> None:
        name = endpoint.name
        try:
            status, body = await self._client.get(endpoint.admin_url, WORKER_LOAD, self._seconds, self._headers)
            if status != 200:
                raise ValueError(f"status {status}")
            load = decode_document(WorkerLoad, body)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if name in self._answered:
                log.warning("worker %s: no load: %s", name, str(error) or type(error).__name__)
            self._answered.discard(name)
            self._registry.record_failure(name)
            return
        self._answered.add(name)
        self._registry.record_load(name, load)
