"""Requests that have lost their worker: how long they wait for another one, and that the operator learns of them."""

from __future__ import annotations

import asyncio
import time

import pytest

from specdecode_router.errors import ApiError
from specdecode_router.relay import attempt_history
from support.relay_harness import LIMITS, chat, harness, wait_until
from support.router_harness import router_over
from support.stand_in_worker import Script, error_frame, text_of

BODY = chat()
FULL = error_frame(429, "rate_limit_exceeded", retryable=True)


class RecordedDemand:
    """Writer of held requests that only records them."""

    def __init__(self) -> None:
        self.held: list[tuple[int, float]] = []

    def set_held(self, requests: int, oldest_seconds: float) -> None:
        self.held.append((requests, oldest_seconds))

    async def run(self) -> None:
        await asyncio.Event().wait()


async def test_request_waits_as_long_as_a_held_one_while_there_is_no_worker() -> None:
    async with harness(Script(silent_at=5), Script()) as over:
        first, second = over.registry.endpoints
        over.registry.update([first])
        task = asyncio.create_task(over.run(BODY))
        await wait_until(lambda: len(over.client.events) == 5)
        over.registry.update([])
        over.scripts[0].close_at = 5
        over.workers[0].voice.set()
        await wait_until(lambda: over.registry.demand[0] == 1)
        await asyncio.sleep(1.5 * LIMITS.no_worker_seconds)
        assert not task.done()
        assert over.registry.demand[1] > LIMITS.no_worker_seconds
        over.registry.update([second])
        assert over.registry.demand == (0, 0.0), "a worker is there"
        assert (await task).text() == text_of(BODY, 20)


@pytest.mark.slow
async def test_no_worker_until_the_end_of_the_hold_time() -> None:
    async with harness(Script()) as over:
        over.registry.update([])
        began = time.monotonic()
        with pytest.raises(ApiError) as failed:
            await over.run(BODY)
        assert (failed.value.status, failed.value.code) == (503, "no_worker")
        assert time.monotonic() - began > LIMITS.hold_seconds - 0.1
        assert over.registry.demand == (0, 0.0)


async def test_request_that_leaves_its_only_worker_out_is_no_demand() -> None:
    async with harness(Script(close_at=5)) as over:
        task = asyncio.create_task(over.run(BODY))
        await wait_until(lambda: over.registry.counts()["suspect"] == 1)
        assert over.registry.demand == (0, 0.0), "the worker may answer again"
        with pytest.raises(ApiError):
            await task


async def test_a_stream_waits_for_a_place_at_a_full_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_history, "_EXCLUDE_SECONDS", 0.1)
    async with harness(Script(move_at=9), Script(refuse=FULL)) as over:
        task = asyncio.create_task(over.run(BODY))
        await wait_until(lambda: len(over.workers[1].requests) == 3)
        over.scripts[1].refuse = None
        assert (await task).text() == text_of(BODY, 20)


async def test_the_wait_for_a_place_ends_although_full_workers_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_history, "_EXCLUDE_SECONDS", 0.1)
    async with harness(Script(move_at=9), Script(refuse=FULL)) as over:
        over.context.limits = LIMITS.model_copy(update={"hold_seconds": 0.6})
        with pytest.raises(ApiError) as failed:
            await over.run(BODY, seconds=3)
        assert (failed.value.status, failed.value.code) == (503, "no_worker")
        assert over.client.text() == text_of(BODY, 9)
        assert len(over.workers[1].requests) > 1


async def test_time_of_each_stage_is_observed() -> None:
    async with harness(Script(close_at=5), Script()) as over:
        await over.run(BODY)
        assert over.metric("added_latency_seconds_count", stage="connect") == 2
        assert 0 < over.metric("added_latency_seconds_sum", stage="connect") < 1
        assert over.metric("added_latency_seconds_count", stage="place") == 2
        assert over.metric("added_latency_seconds_count", stage="write") == 20


@pytest.mark.slow
async def test_operator_learns_of_requests_that_lost_the_last_worker() -> None:
    demand = RecordedDemand()
    async with router_over(Script(tokens=50, interval_seconds=0.01), demand=demand, no_worker_seconds=5) as router:
        workers = router.state.relay.workers
        sent = asyncio.create_task(router.post("/v1/chat/completions", data=BODY))
        await wait_until(lambda: router.workers[0].running)
        endpoints = workers.endpoints
        workers.update([])
        router.workers[0].script.close_at = 0
        await wait_until(lambda: demand.held[-1][0] == 1)
        router.workers[0].script.close_at = None
        workers.update(endpoints)
        _, _, content = await sent
        assert content.endswith(b"[DONE]\n\n")
        await wait_until(lambda: demand.held[-1] == (0, 0.0))


async def test_prefixes_of_a_worker_that_is_gone_are_dropped() -> None:
    async with router_over(Script(), Script()) as router:
        prefixes, workers = router.state.placement.prefixes, router.state.relay.workers
        first, second = workers.endpoints
        prefixes._retention = {first.name: 0.5, second.name: 0.5}
        workers.update([second])
        assert set(prefixes._retention) == {second.name}
