"""Workers of several deployments as one list."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from specdecode_router.discovery.endpoint_slices import Discovery, Update
from specdecode_router.workers.worker import Endpoint


class JoinedDiscovery:
    """Workers of the router's own deployment and of the others that share its traffic."""

    def __init__(self, own: str, sources: Mapping[str, Discovery]) -> None:
        """Prepare the discovery.

        Args:
            own: Name of the own deployment. Before its workers are known, no others are reported: they would get all
                of the traffic.
            sources: Source of the workers of each deployment, by name.
        """
        self._own, self._sources = own, sources
        self._endpoints: dict[str, list[Endpoint]] = {}

    async def run(self, update: Update) -> None:
        """Report all workers whenever those of a deployment change, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name, source in self._sources.items():
                group.create_task(self._follow(name, source, update))

    async def _follow(self, deployment: str, source: Discovery, update: Update) -> None:
        def report(endpoints: Sequence[Endpoint]) -> None:
            self._endpoints[deployment] = [replace(one, deployment=deployment) for one in endpoints]
            if self._own in self._endpoints:
                update([one for name in self._sources for one in self._endpoints.get(name, ())])

        await source.run(report)
