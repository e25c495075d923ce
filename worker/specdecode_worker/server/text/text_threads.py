"""Threads for work on texts, apart from the event loop: few of them, so that memory and processor time are bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import TypeVar

from specdecode_worker.server.text.template_pool import MAX_PROCESSES

Result = TypeVar("Result")

SHORT_TEXT_CHARACTERS = 16 * 1024
"""Text up to which work is short: it takes some milliseconds, and does not wait behind longer work."""


class Lane(Enum):
    """Kind of work; each kind waits only for work of its own kind. The value is the number of threads."""

    SHORT = ("short", 2)
    LONG = ("long", 2)
    TEMPLATE = ("template", MAX_PROCESSES)


def lane_of(characters: int) -> Lane:
    """Return the lane of work on a text, or on as many tokens."""
    return Lane.SHORT if characters <= SHORT_TEXT_CHARACTERS else Lane.LONG


class TextThreads:
    """Threads of all lanes. Work that waits for a thread holds no memory except its request."""

    def __init__(self) -> None:
        self._executors = {
            lane: ThreadPoolExecutor(lane.value[1], thread_name_prefix=f"text-{lane.value[0]}") for lane in Lane
        }
        self._running: set[threading.Event] = set()

    async def run(self, lane: Lane, work: Callable[[threading.Event], Result]) -> Result:
        """Run ``work`` in a thread of ``lane`` and return its result.

        ``work`` gets an event that is set when the caller is cancelled or the threads are closed; it checks the event
        between parts of its work. Work that has not begun by then never does.
        """
        stopped = threading.Event()
        self._running.add(stopped)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executors[lane], work, stopped)
        finally:
            stopped.set()
            self._running.discard(stopped)

    def close(self) -> None:
        """Drop the work that has not begun, and stop the other work at its next check, without waiting for it."""
        for stopped in self._running:
            stopped.set()
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
