"""Vital parts of the server process: tasks and threads whose failure ends the worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

log = logging.getLogger(__name__)


class VitalParts:
    """Tasks that must live as long as the worker. ``failed`` resolves with the reason of the first failure."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._started: list[asyncio.Task[None]] = []

    def start(self, name: str, work: Coroutine[object, object, None]) -> None:
        """Run ``work`` as a vital task, until it ends or `stop` cancels it."""
        task = asyncio.create_task(work)
        self._started.append(task)
        self.watch(name, task)

    def watch(self, name: str, task: asyncio.Task[None]) -> None:
        """Treat an exception in ``task`` as the failure of the worker."""
        task.add_done_callback(lambda ended: self._ended(name, ended))

    async def stop(self) -> None:
        """Cancel the tasks that `start` started."""
        for task in self._started:
            task.cancel()
        await asyncio.gather(*self._started, return_exceptions=True)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("the %s failed", name, exc_info=error)
        if not self.failed.done():
            self.failed.set_result(f"the {name} failed: {type(error).__name__}: {error}")
