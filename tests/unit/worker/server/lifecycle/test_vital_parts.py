"""Tests of vital parts: an exception counts as a failure, a regular end and a cancellation do not."""

from __future__ import annotations

import asyncio

from specdecode_worker.server.listening import VitalParts


async def _fail(reason: str) -> None:
    raise RuntimeError(reason)


async def test_the_first_failure_is_the_reason() -> None:
    parts = VitalParts()
    parts.start("first part", _fail("it broke"))
    parts.start("second part", _fail("it broke too"))
    assert await asyncio.wait_for(parts.failed, 5) == "the first part failed: RuntimeError: it broke"
    await parts.stop()


async def test_a_regular_end_is_no_failure() -> None:
    parts = VitalParts()
    parts.start("short part", asyncio.sleep(0))
    parts.start("long part", asyncio.sleep(60))
    await asyncio.sleep(0.05)
    await parts.stop()
    assert not parts.failed.done()
