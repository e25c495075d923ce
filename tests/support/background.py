"""Asyncio tasks that run in the background of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background(*works: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Run coroutines that must not end by themselves, and cancel them after the block."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
        assert not [task for task in tasks if task.done()], "it goes on until it is cancelled"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
