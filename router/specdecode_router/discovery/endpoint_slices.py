"""Workers by list and watch of the EndpointSlices of their Service.

While the API server is gone, the last list stays: workers that run are reachable without it. A watch lasts about 20
seconds and is resumed where it ended. A connection on which nothing arrives, not even that end, is noticed a few
seconds later.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from specdecode_router.discovery.api_server import ApiServer, ApiServerError, VersionExpired
from specdecode_router.discovery.endpoints import endpoints_of
from specdecode_router.workers.worker import Endpoint

MIN_WATCH_SECONDS, MAX_WATCH_SECONDS = 12, 18
"""Length of one watch, drawn at random so that the watches of all routers do not end together."""
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 15.0
"""Pause before a new list after an error; it doubles from error to error."""
SHORT_WATCH_SECONDS = 1.0
"""A watch that ends earlier than this without any event counts as an error."""

Update = Callable[[Sequence[Endpoint]], None]
log = logging.getLogger(__name__)


class Discovery(Protocol):
    """Source of workers."""

    async def run(self, update: Update) -> None:
        """Call ``update`` with all workers whenever they change, until cancelled."""
        ...


class EndpointSliceDiscovery:
    """Workers of a Service, as its EndpointSlices list them."""

    def __init__(
        self,
        api: ApiServer,
        namespace: str,
        service: str,
        *,
        port: str = "admin",
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Prepare the discovery.

        Args:
            api: Client of the API server.
            namespace: Namespace of the Service.
            service: Name of the headless Service of the workers.
            port: Name of the port of the admin API.
            clock: Monotonic clock, in seconds.
        """
        self._api, self._namespace, self._service, self._port = api, namespace, service, port
        self._clock = clock or time.monotonic
        self._slices: dict[str, dict[str, Any]] = {}
        """EndpointSlices by name."""
        self._reported: tuple[Endpoint, ...] | None = None
        self._pause = MIN_RETRY_SECONDS
        self._progressed = False
        """The API server has sent something since the last error."""

    async def run(self, update: Update) -> None:
        """Report the workers whenever they change, until cancelled. Errors leave the last list as it is."""
        while True:
            try:
                version = await self._list(update)
                while True:
                    version = await self._watch(version, update)
            except ApiServerError as error:
                await self._back_off(error)

    async def _list(self, update: Update) -> str:
        slices, version = await self._api.list_slices(self._namespace, self._service)
        self._saw_progress()
        self._slices = {one["metadata"]["name"]: one for one in slices}
        self._report(update)
        return version

    async def _watch(self, version: str, update: Update) -> str:
        """Follow one watch to its end. Return the resource version to resume from."""
        started, events = self._clock(), 0
        seconds = random.randint(MIN_WATCH_SECONDS, MAX_WATCH_SECONDS)
        async for kind, one in self._api.watch_slices(self._namespace, self._service, version, seconds):
            events += 1
            self._saw_progress()
            version = one["metadata"]["resourceVersion"]
            if kind == "DELETED":
                self._slices.pop(one["metadata"]["name"], None)
            elif kind != "BOOKMARK":
                self._slices[one["metadata"]["name"]] = one
            self._report(update)
        if not events and self._clock() - started < SHORT_WATCH_SECONDS:
            raise ApiServerError("the watch ended at once")
        self._saw_progress()
        return version

    def _report(self, update: Update) -> None:
        endpoints = endpoints_of(self._slices.values(), self._port)
        if endpoints == self._reported:
            return
        self._reported = endpoints
        serving = sum(not one.terminating for one in endpoints)
        log.info("%s: %d workers, %d of them leaving", self._service, len(endpoints), len(endpoints) - serving)
        update(endpoints)

    def _saw_progress(self) -> None:
        self._pause = MIN_RETRY_SECONDS
        self._progressed = True

    async def _back_off(self, error: ApiServerError) -> None:
        """Sleep before the next list. A resource version that expired after a working watch needs no pause."""
        log.warning("endpoints of %s: listing again: %s", self._service, error)
        pause = 0.0 if isinstance(error, VersionExpired) and self._progressed else self._pause
        self._progressed = False
        if pause:
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            self._pause = min(MAX_RETRY_SECONDS, self._pause * 2)
