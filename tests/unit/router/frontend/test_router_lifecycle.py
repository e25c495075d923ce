"""Shutdown of a router: the delay for endpoints, and after it the grace period of running requests."""

from __future__ import annotations

import asyncio

from specdecode_router.frontend.lifecycle import Lifecycle, State
from support.virtual_loop import run_virtual


async def _leave(delay_seconds: float, grace_seconds: float) -> tuple[int, float, State]:
    """Shut down with a request that does not end. Return what is left, the time it took, and the state before."""
    loop, lifecycle = asyncio.get_running_loop(), Lifecycle()
    with lifecycle.request():
        leaving = asyncio.ensure_future(lifecycle.shut_down(delay_seconds, grace_seconds))
        await asyncio.sleep(delay_seconds - 0.1)
        state = lifecycle.state
        return await leaving, loop.time(), state


def test_the_grace_period_begins_after_the_endpoint_delay() -> None:
    assert run_virtual(_leave(1, 1.5)) == (1, 2.5, State.LEAVING)
    assert run_virtual(_leave(2, 1)) == (1, 3, State.LEAVING), "a delay that is longer than the grace period"


def test_a_router_without_requests_leaves_after_the_delay() -> None:
    lifecycle = Lifecycle()
    assert run_virtual(lifecycle.shut_down(2, 60)) == 0
    assert lifecycle.state is State.REFUSING
