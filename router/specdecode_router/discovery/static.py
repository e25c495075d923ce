"""Fixed list of workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from specdecode_router.workers.worker import Endpoint


class StaticDiscovery:
    """Workers of the command line."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls

    async def run(self, update: Callable[[Sequence[Endpoint]], None]) -> None:
        """Report the workers once."""
        update([Endpoint(url, url.rstrip("/")) for url in self._urls])
        await asyncio.Event().wait()
