"""One request over stand-in workers that fail, refuse, move or fall silent: its text never changes."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from specdecode_router.errors import ApiError
from specdecode_router.relay.client_stream import ClientGone, RefusedByWorker
from support.relay_harness import LIMITS, Harness, chat, harness, wait_until
from support.stand_in_worker import Script, error_frame, text_of

BODY = chat()
TEXT = text_of(BODY, 20)


async def check_text(over: Harness, attempts: list[int]) -> None:
    """Run one request and compare its text. ``attempts`` are the numbers of requests that each worker gets."""
    client = await over.run(BODY)
    assert client.text() == TEXT
    assert client.body == b"data: [DONE]\n\n"
    assert len(client.opened) == 1
    await over.settled()
    assert [len(worker.requests) for worker in over.workers] == attempts
    assert [view.in_flight for view in over.registry.views()] == [0] * len(over.registry.views())
    assert over.registry.counts()["suspect"] <= len(attempts)


GONE = error_frame(500, "engine_error", retryable=True)
WHOLE: dict[str, tuple[list[Script], list[int]]] = {
    "unbroken": ([Script(), Script()], [1, 0]),
    "crash inside of a frame": ([Script(cut_frame_at=6), Script()], [1, 1]),
    "steps of several tokens continue at any token": ([Script(close_at=7, per_step=1), Script(per_step=4)], [1, 1]),
    "repeated steps reach the client once": ([Script(repeat_steps=True)], [1]),
    "a missing step is a failure": ([Script(skip_at=5), Script()], [1, 1]),
    "retryable refusal": ([Script(refuse=error_frame(503, "loading", retryable=True)), Script()], [1, 1]),
    "engine that is gone in the middle": ([Script(refuse=GONE, refuse_at=5), Script()], [1, 1]),
}
"""Scripts of workers, and the numbers of requests that they get."""


@pytest.mark.parametrize("case", WHOLE)
async def test_the_text_is_whole(case: str) -> None:
    scripts, attempts = WHOLE[case]
    async with harness(*scripts) as over:
        await check_text(over, attempts)


async def test_crash_before_open_starts_again_elsewhere() -> None:
    async with harness(Script(close_before_open=True), Script(), cooldown_seconds=60) as over:
        await check_text(over, [1, 1])
        assert over.workers[1].requests[0].resume is None
        assert over.registry.counts()["suspect"] == 1


async def test_worker_that_refuses_connections() -> None:
    async with harness(Script(), Script()) as over:
        endpoints = over.registry.endpoints
        over.registry.update([dataclasses.replace(endpoints[0], admin_url="http://127.0.0.1:9"), endpoints[1]])
        await check_text(over, [0, 1])


@pytest.mark.parametrize("at", [0, 1, 7, 19])
async def test_crash_after_open_continues_from_the_journal(at: int) -> None:
    async with harness(Script(close_at=at), Script()) as over:
        await check_text(over, [1, 1])
        resume = over.workers[1].requests[0].resume
        assert len(resume.choices[0].ids) == at
        assert resume.choices[0].counters.cached_tokens == max(at - 1, 0)
        assert over.metric("resumes_total", reason="connection", outcome="resumed") == 1


async def test_moved_continues_at_once_and_the_worker_gets_no_new_requests() -> None:
    async with harness(Script(move_at=9), Script()) as over:
        await check_text(over, [1, 1])
        assert [view.endpoint.name for view in over.registry.views()] == ["w1"]
        assert over.metric("resumes_total", reason="moved", outcome="resumed") == 1
        assert [one.blocks_at for one in over.workers[1].requests] == ["127.0.0.1:8002"], "its blocks can move along"
        assert over.workers[0].requests[0].blocks_at == ""


async def test_two_choices_continue_each_from_its_own_token() -> None:
    body = chat(n=2)
    async with harness(Script(close_at=5), Script()) as over:
        client = await over.run(body)
        assert [client.text(choice) for choice in (0, 1)] == [text_of(body, 20, choice) for choice in (0, 1)]


async def test_whole_body_is_tried_again() -> None:
    body = chat(stream=False)
    async with harness(Script(close_at=5), Script()) as over:
        client = await over.run(body)
        assert json.loads(client.body)["texts"] == [text_of(body, 20)]
        assert client.events == []


async def test_refusals_are_bounded_and_the_last_one_is_the_answer() -> None:
    full = Script(refuse=error_frame(429, "rate_limit_exceeded", retryable=True))
    async with harness(full, full, full, full) as over:
        with pytest.raises(RefusedByWorker) as refused:
            await over.run(BODY)
        assert refused.value.error.status == 429
        assert sum(len(worker.requests) for worker in over.workers) == 3


async def test_other_errors_go_to_the_client() -> None:
    async with harness(Script(refuse=error_frame(400, "invalid_value", retryable=False)), Script()) as over:
        with pytest.raises(RefusedByWorker) as refused:
            await over.run(BODY)
        assert refused.value.error.body == error_frame(400, "invalid_value", retryable=False).body
        assert not over.workers[1].requests


async def test_error_in_the_middle_goes_to_the_client() -> None:
    script = Script(refuse=error_frame(504, "deadline_exceeded", retryable=False), refuse_at=5)
    async with harness(script, Script()) as over:
        with pytest.raises(RefusedByWorker):
            await over.run(BODY)
        assert over.client.text() == text_of(BODY, 5)
        assert not over.workers[1].requests


async def test_two_crashes_end_the_request() -> None:
    async with harness(Script(close_at=5), Script(refuse=GONE, refuse_at=9), Script()) as over:
        with pytest.raises(ApiError) as failed:
            await over.run(BODY)
        assert failed.value.status == 500
        assert "2 workers failed" in failed.value.message
        assert not over.workers[2].requests


async def test_a_connection_that_breaks_while_the_client_does_not_read_is_no_fault_of_the_worker() -> None:
    async with harness(Script(close_at=5), Script()) as over:
        over.context.limits = LIMITS.model_copy(update={"write_timeout_seconds": 0.1})
        over.client.write_seconds = 0.2
        relay = over.relay(BODY)
        task = asyncio.create_task(relay.run())
        await wait_until(lambda: over.workers[1].requests)
        assert (over.registry.counts()["suspect"], relay._history.crashes) == (0, 0)
        over.client.write_seconds = 0.0
        await task
        assert over.client.text() == TEXT


async def test_a_continuation_that_no_worker_could_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdecode_router.relay.relay.MAX_FRAME_BYTES", 600)
    async with harness(Script(tokens=400, per_step=20, close_at=200), Script(tokens=400)) as over:
        with pytest.raises(ApiError) as failed:
            await over.run(BODY)
        assert (failed.value.status, failed.value.code) == (500, "worker_failed")
        assert not over.workers[1].requests


async def test_another_key_never_continues_the_text() -> None:
    async with harness(Script(close_at=5), Script(key="key-2")) as over:
        with pytest.raises(ApiError) as failed:
            await over.run(BODY)
        assert (failed.value.status, failed.value.headers["Retry-After"]) == (503, "1")
        assert "same text" in failed.value.message
        assert over.metric("resumes_total", reason="connection", outcome="failed") == 1
        assert over.client.text() == text_of(BODY, 5)


async def test_a_worker_that_comes_in_time_continues() -> None:
    async with harness(Script(close_at=5), Script()) as over:
        both = over.registry.endpoints
        over.registry.update(both[:1])
        asyncio.get_running_loop().call_later(0.3, over.registry.update, both)
        await check_text(over, [1, 1])


async def test_deadline_passes_at_a_worker_that_says_nothing() -> None:
    async with harness(Script(silent_at=3)) as over:
        with pytest.raises(ApiError) as failed:
            await over.run(BODY, seconds=0.2)
        assert (failed.value.status, failed.value.headers["X-Should-Retry"]) == (504, "false")
        assert 0 < (over.workers[0].requests[0].timeout_seconds or 0) <= 0.2


@pytest.mark.parametrize("answered", [False, True])
async def test_deadline_of_a_continuation_is_no_failure_of_it(answered: bool) -> None:
    refusal = error_frame(504, "deadline_exceeded", retryable=False)
    async with harness(Script(close_at=3), Script(refuse=refusal)) as over:
        over.context.limits = over.context.limits.model_copy(update={"no_worker_seconds": 5.0, "hold_seconds": 5.0})
        if not answered:
            over.registry.update(over.registry.endpoints[:1])
        with pytest.raises((ApiError, RefusedByWorker)) as failed:
            await over.run(BODY, seconds=20 if answered else -0.5)
        assert failed.value.status == 504
        assert over.metric("resumes_total", reason="connection", outcome="cancelled") == 1
        assert over.metric("resumes_total", reason="connection", outcome="failed") == 0


async def test_latency_of_writes_is_without_the_slowness_of_the_client() -> None:
    async with harness(Script(tokens=3)) as over:
        over.client.write_seconds = 0.2
        await over.run(BODY)
        assert over.metric("added_latency_seconds_count", stage="write") >= 3
        assert over.metric("added_latency_seconds_sum", stage="write") < 0.2


async def test_client_that_is_gone_at_a_write_cancels_at_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with harness(Script(tokens=100_000)) as over:

        async def gone(events: bytes) -> None:
            raise ClientGone("gone")

        monkeypatch.setattr(over.client, "write", gone)
        with pytest.raises(ClientGone):
            await over.run(BODY)
        await wait_until(lambda: over.workers[0].cancelled == 1)


async def test_trace_headers_and_identity_reach_every_attempt() -> None:
    async with harness(Script(close_at=5), Script()) as over:
        await over.run(BODY)
        first, second = (worker.requests[0] for worker in over.workers)
        assert (first.request_id, first.body) == (second.request_id, second.body) == ("r1", BODY)
