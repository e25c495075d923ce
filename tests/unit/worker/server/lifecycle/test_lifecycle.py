"""Tests of the states of a worker's life cycle and of its shutdown."""

from __future__ import annotations

import asyncio
import time

import pytest

from specdecode_worker.contract import ServerConfig
from specdecode_worker.server.errors import Unavailable
from specdecode_worker.server.listening import GracefulShutdown, Lifecycle, LifecycleState


def at(state: LifecycleState) -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.state = state
    return lifecycle


@pytest.mark.parametrize(
    ("state", "healthy", "ready", "shutting_down", "refusal"),
    [
        (LifecycleState.LOADING, True, False, False, "loading"),
        (LifecycleState.SERVING, True, True, False, None),
        (LifecycleState.LEAVING, True, False, True, None),
        (LifecycleState.DRAINING, True, False, True, "draining"),
        (LifecycleState.FAILED, False, False, False, "engine_gone"),
    ],
)
def test_probes_and_refusals_per_state(
    state: LifecycleState, healthy: bool, ready: bool, shutting_down: bool, refusal: str | None
) -> None:
    lifecycle = at(state)
    assert (lifecycle.healthy, lifecycle.ready, lifecycle.shutting_down) == (healthy, ready, shutting_down)
    if refusal is None:
        lifecycle.check_accepting()
    else:
        with pytest.raises(Unavailable) as refused:
            lifecycle.check_accepting()
        assert refused.value.error_code == refusal


def test_state_never_moves_backwards() -> None:
    lifecycle = at(LifecycleState.LEAVING)
    lifecycle.serve()
    assert lifecycle.state is LifecycleState.LEAVING
    lifecycle.fail("first")
    lifecycle.fail("second")
    lifecycle.drain()
    assert (lifecycle.state, lifecycle.failure) == (LifecycleState.FAILED, "first")


def test_suspicion_makes_a_serving_worker_unready_for_a_while() -> None:
    lifecycle = at(LifecycleState.SERVING)
    lifecycle.suspicion = "no progress for 31 s"
    assert (lifecycle.ready, lifecycle.healthy) == (False, True)
    assert lifecycle.readiness == "serving, but the engine makes no progress for 31 s"
    lifecycle.check_accepting()
    lifecycle.suspicion = ""
    assert (lifecycle.ready, lifecycle.readiness) == (True, "serving")


def shutdown(
    lifecycle: Lifecycle, running: list[int], delay: float, grace: float, exit_now: asyncio.Event | None = None
) -> GracefulShutdown:
    config = ServerConfig(endpoint_delay_seconds=delay, grace_period_seconds=grace)
    return GracefulShutdown(lifecycle, config, lambda: running[0], exit_now or asyncio.Event())


async def test_shutdown_is_unready_at_once_and_refuses_after_the_delay() -> None:
    lifecycle = at(LifecycleState.SERVING)
    shutting_down = shutdown(lifecycle, [0], delay=0.2, grace=5)
    drained = shutting_down.begin()
    assert not lifecycle.ready
    assert shutting_down.begin() is drained
    await asyncio.sleep(0.05)
    lifecycle.check_accepting()
    assert await drained == 0
    assert lifecycle.state is LifecycleState.DRAINING


async def test_shutdown_waits_for_running_requests() -> None:
    running = [1]
    drained = shutdown(at(LifecycleState.SERVING), running, delay=0, grace=5).begin()
    await asyncio.sleep(0.2)
    assert not drained.done()
    running[0] = 0
    assert await drained == 0


@pytest.mark.parametrize("exit_now", [True, False])
async def test_shutdown_ends_after_the_grace_period_or_a_second_signal(exit_now: bool) -> None:
    exit_event = asyncio.Event()
    drained = shutdown(at(LifecycleState.SERVING), [2], 0.1, 60 if exit_now else 0.2, exit_event).begin()
    began = time.monotonic()
    if exit_now:
        exit_event.set()
    assert await drained == 2
    assert time.monotonic() - began < 5


async def test_the_grace_period_begins_after_the_endpoint_delay() -> None:
    lifecycle, began = at(LifecycleState.SERVING), time.monotonic()
    drained = shutdown(lifecycle, [1], delay=0.4, grace=0.2).begin()
    await asyncio.sleep(0.3)
    assert lifecycle.state is LifecycleState.LEAVING, "new requests are still served"
    assert await drained == 1
    assert 0.55 < time.monotonic() - began < 5


async def test_shutdown_before_ready_skips_the_endpoint_delay() -> None:
    lifecycle = at(LifecycleState.LOADING)
    assert await asyncio.wait_for(shutdown(lifecycle, [0], delay=50, grace=60).begin(), 1) == 0
