"""Report of held requests to the operator, which starts workers for them: one entry of the ConfigMap ``<name>-demand``.

The entry is written when requests are first held, refreshed while they are, and removed afterwards. The operator sees
the present state at any time, so nothing is lost if it restarts, or if a write fails: the next one is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable

from specdecode_router.discovery.api_server import ApiServer, ApiServerError
from specdecode_worker.contract.demand import FRESH_SECONDS, REFRESH_SECONDS, HeldRequests, read_demand

RETRY_SECONDS = 1.0
"""Pause after a failed write. A held client waits for it."""
MAX_RETRY_SECONDS = 8.0
"""Longest pause; the pauses double. Some writes must fit into the time for which an entry is fresh."""
MIN_WRITE_SECONDS = 0.5
"""Least time between two writes, where demand appears and ends in quick turns."""
ABANDONED_SECONDS = 10 * FRESH_SECONDS
"""Age of an entry of a router that died without removing it."""

log = logging.getLogger(__name__)


class DemandWriter:
    """Entry of one router in the ConfigMap of its deployment."""

    def __init__(
        self,
        api: ApiServer,
        namespace: str,
        name: str,
        router: str,
        *,
        wall_clock: Callable[[], float] = time.time,
        refresh_seconds: float = REFRESH_SECONDS,
    ) -> None:
        """Prepare the writer.

        Args:
            api: Client of the API server.
            namespace: Namespace of the ConfigMap.
            name: Name of the ConfigMap.
            router: Name of this router's pod, the key of its entry.
            wall_clock: Seconds since the epoch.
            refresh_seconds: Time between two writes while requests are held.
        """
        self._api, self._namespace, self._name, self._router = api, namespace, name, router
        self._clock = wall_clock
        self._refresh_seconds = refresh_seconds
        self._held, self._since = 0, 0.0
        """Held requests, and the time of the oldest of them."""
        self._changed = asyncio.Event()
        """Demand has appeared or ended."""

    def set_held(self, requests: int, oldest_seconds: float) -> None:
        """Set the number of held requests and the time for which the oldest of them has waited. Does no I/O."""
        appeared_or_ended = bool(requests) != bool(self._held)
        self._held, self._since = requests, self._clock() - oldest_seconds
        if appeared_or_ended:
            self._changed.set()

    async def run(self) -> None:
        """Write the entry until cancelled. An entry that an earlier process of this pod has left is removed first."""
        has_entry, pause = True, RETRY_SECONDS
        while True:
            self._changed.clear()
            delay: float | None = None
            if self._held or has_entry:
                try:
                    has_entry = await self._write()
                except ApiServerError as error:
                    log.warning("%d held requests could not be reported: %s", self._held, error)
                    delay, pause = pause * random.uniform(0.5, 1.5), min(MAX_RETRY_SECONDS, pause * 2)
                else:
                    delay, pause = self._refresh_seconds if has_entry else None, RETRY_SECONDS
                await asyncio.sleep(min(MIN_WRITE_SECONDS, self._refresh_seconds))
            await self._wait(delay)

    async def _wait(self, seconds: float | None) -> None:
        """Wait until demand appears or ends, or for this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _write(self) -> bool:
        """Write the present state. Return whether the ConfigMap has an entry of this router afterwards."""
        now, held = self._clock(), self._held
        changes: dict[str, str | None]
        if held:
            entry = HeldRequests(requests=held, oldest_seconds=max(0.0, now - self._since), at=now)
            changes = {self._router: entry.model_dump_json()}
        else:
            changes = dict.fromkeys([self._router, *await self._abandoned(now)])
        await self._api.patch_config_map(self._namespace, self._name, changes)
        return bool(held)

    async def _abandoned(self, now: float) -> list[str]:
        """Return the entries of routers that died while they held requests."""
        data = await self._api.config_map_data(self._namespace, self._name)
        return [router for router, entry in read_demand(data).items() if now - entry.at > ABANDONED_SECONDS]
