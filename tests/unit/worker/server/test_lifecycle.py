"""Tests of the states of a worker's life cycle and of its shutdown."""

from __future__ import annotations

import asyncio
import time

import pytest

from specdecode_worker.contract import ServerConfig
from specdecode_worker.server.errors import Unavailable
from specdecode_worker.server.lifecycle import Departure, Lifecycle, State


def at(state: State) -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.state = state
    return lifecycle


@pytest.mark.parametrize(
    ("state", "healthy", "ready", "leaving", "refusal"),
    [
        (State.LOADING, True, False, False, "loading"),
        (State.SERVING, True, True, False, None),
        (State.LEAVING, True, False, True, None),
        (State.DRAINING, True, False, True, "draining"),
        (State.FAILED, False, False, False, "engine_gone"),
    ],
)
def test_states(state: State, healthy: bool, ready: bool, leaving: bool, refusal: str | None) -> None:
    lifecycle = at(state)
    assert (lifecycle.healthy, lifecycle.ready, lifecycle.leaving) == (healthy, ready, leaving)
    if refusal is None:
        lifecycle.check_accepting()
    else:
        with pytest.raises(Unavailable) as refused:
            lifecycle.check_accepting()
        assert refused.value.error_code == refusal


def test_there_is_no_way_back() -> None:
    lifecycle = at(State.LEAVING)
    lifecycle.serve()
    assert lifecycle.state is State.LEAVING
    lifecycle.fail("first")
    lifecycle.fail("second")
    lifecycle.drain()
    assert (lifecycle.state, lifecycle.failure) == (State.FAILED, "first")


def departure(
    lifecycle: Lifecycle, running: list[int], delay: float, grace: float, hurried: asyncio.Event | None = None
) -> Departure:
    config = ServerConfig(endpoint_delay_seconds=delay, grace_period_seconds=grace)
    return Departure(lifecycle, config, lambda: running[0], hurried or asyncio.Event())


async def test_not_ready_at_once_and_refusing_after_the_delay() -> None:
    lifecycle = at(State.SERVING)
    leaving = departure(lifecycle, [0], delay=0.2, grace=5)
    drained = leaving.begin()
    assert not lifecycle.ready
    assert leaving.begin() is drained
    await asyncio.sleep(0.05)
    lifecycle.check_accepting()
    assert await drained == 0
    assert lifecycle.state is State.DRAINING


async def test_it_waits_for_running_requests() -> None:
    running = [1]
    drained = departure(at(State.SERVING), running, delay=0, grace=5).begin()
    await asyncio.sleep(0.2)
    assert not drained.done()
    running[0] = 0
    assert await drained == 0


@pytest.mark.parametrize("hurried", [True, False])
async def test_but_not_for_ever(hurried: bool) -> None:
    hurry = asyncio.Event()
    drained = departure(at(State.SERVING), [2], 0.1, 60 if hurried else 0.2, hurry).begin()
    began = time.monotonic()
    if hurried:
        hurry.set()
    assert await drained == 2
    assert time.monotonic() - began < 5


async def test_a_worker_that_never_was_ready_leaves_at_once() -> None:
    lifecycle = at(State.LOADING)
    assert await asyncio.wait_for(departure(lifecycle, [0], delay=50, grace=60).begin(), 1) == 0
