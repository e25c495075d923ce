"""Waiting for what a test has set going, in a thread and on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T | None], seconds: float = 20) -> T:
    """Return the first true result of a condition. Raise AssertionError if it stays false."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.002)
    return result


async def eventually(condition: Callable[[], object], seconds: float = 10) -> None:
    """Wait until a condition holds. Raise TimeoutError if it stays false."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)
