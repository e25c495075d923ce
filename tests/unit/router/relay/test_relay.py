"""One request over stand-in workers that fail, refuse, move or fall silent: its text never changes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time

import pytest

from specdecode_router.errors import ApiError
from specdecode_router.relay import attempt_history
from specdecode_router.relay.client_stream import ClientGone, RefusedByWorker
from support.router_harness import LIMITS, Harness, RecordingClient, chat, harness, router_over
from support.stand_in_worker import Script, error_frame, text_of
from support.waiting import eventually

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
        first, second = (worker.requests[0] for worker in over.workers)
        assert (first.request_id, first.body) == (second.request_id, second.body) == ("r1", BODY)
        assert [worker.traceparents for worker in over.workers] == [["t"], ["t"]]
        resume = second.resume
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
        await eventually(lambda: over.workers[1].requests)
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
        await eventually(lambda: over.workers[0].cancelled == 1)


# --- a silent worker gets a second attempt next to it; whichever delivers first wins ----------------------------------


async def run_with_two_attempts(over: Harness, seconds: float = 0) -> RecordingClient:
    """Run a request whose silent worker goes on some time after a second one got the request too."""
    task = asyncio.create_task(over.run(BODY))
    await eventually(lambda: over.workers[1].requests)
    await asyncio.sleep(seconds)
    over.workers[0].voice.set()
    return await task


async def test_silent_worker_loses() -> None:
    async with harness(Script(silent_at=5), Script()) as over:
        began = time.monotonic()
        client = await over.run(BODY)
        assert client.text() == TEXT
        assert time.monotonic() - began < 2
        assert over.registry.counts()["suspect"] == 1, "new requests avoid it"
        assert over.metric("hedges_total", outcome="won") == 1
        assert over.metric("resumes_total", reason="silence", outcome="resumed") == 1
        assert over.metric("resume_gap_seconds_count") == 1
        assert 0.3 < over.metric("resume_gap_seconds_sum") < 2


async def test_loser_is_cancelled_while_the_winner_runs() -> None:
    async with harness(Script(silent_at=5, tokens=10_000), Script(tokens=10_000, interval_seconds=0.01)) as over:
        task = asyncio.create_task(over.run(BODY))
        await eventually(lambda: over.workers[0].cancelled)
        assert over.workers[1].running
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_false_suspicion_changes_nothing() -> None:
    async with harness(Script(silent_at=5), Script(resumed_delay_seconds=30)) as over:
        client = await run_with_two_attempts(over)
        assert client.text() == TEXT
        assert len(client.events) == 20
        await over.settled()
        assert (over.workers[0].ended, over.workers[1].cancelled) == (1, 1)
        assert over.registry.counts()["suspect"] == 0
        assert over.metric("hedges_total", outcome="lost") == 1
        assert over.metric("resumes_total", reason="silence", outcome="resumed") == 0


async def test_a_suspicion_ends_when_the_frames_go_on_without_a_token() -> None:
    async with harness(Script(silent_at=1, interval_seconds=30, alive_seconds=0.1)) as over:
        task = asyncio.create_task(over.run(BODY))
        await eventually(lambda: over.registry.counts()["suspect"])
        over.workers[0].voice.set()
        await eventually(lambda: not over.registry.counts()["suspect"], 2)
        assert len(over.client.events) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_both_deliver_at_the_same_time() -> None:
    async with harness(Script(silent_at=5), Script(resumed_delay_seconds=0.05)) as over:
        client = await run_with_two_attempts(over, 0.05)
        assert client.text() == TEXT
        assert len(client.events) == 20


async def test_silence_before_open() -> None:
    async with harness(Script(open_delay_seconds=30), Script()) as over:
        client = await over.run(BODY)
        assert client.text() == TEXT
        assert len(client.opened) == 1
        assert over.workers[1].requests[0].resume is None


@pytest.mark.slow
async def test_alive_worker_is_not_suspected() -> None:
    script = Script(tokens=3, interval_seconds=0.9, alive_seconds=0.1)
    async with harness(script, Script()) as over:
        client = await over.run(BODY)
        assert client.text() == text_of(BODY, 3)
        assert not over.workers[1].requests


async def test_silent_worker_without_another_one_goes_on() -> None:
    async with harness(Script(silent_at=5)) as over:
        asyncio.get_running_loop().call_later(1.2, over.workers[0].voice.set)
        assert (await over.run(BODY)).text() == TEXT


async def test_second_worker_that_appears_later_is_used() -> None:
    async with harness(Script(silent_at=5), Script()) as over:
        both = over.registry.endpoints
        over.registry.update(both[:1])
        asyncio.get_running_loop().call_later(0.9, over.registry.update, both)
        assert (await over.run(BODY)).text() == TEXT
        assert over.workers[1].requests


async def test_a_stream_that_is_too_long_for_a_second_attempt_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdecode_router.relay.relay.MAX_FRAME_BYTES", 600)
    async with harness(Script(tokens=400, per_step=20, silent_at=200), Script(tokens=400)) as over:
        task = asyncio.create_task(over.run(BODY))
        await eventually(lambda: over.registry.counts()["suspect"])
        await asyncio.sleep(0.1)
        over.workers[0].voice.set()
        assert (await task).text() == text_of(BODY, 400)
        assert not over.workers[1].requests


async def test_two_silent_workers_make_room_for_a_third_one() -> None:
    second = Script(resumed_delay_seconds=30, alive_seconds=30)
    async with harness(Script(silent_at=5), second, Script()) as over:
        client = await asyncio.wait_for(over.run(BODY), 5)
        assert client.text() == TEXT
        assert [len(worker.requests) for worker in over.workers] == [1, 1, 1]
        await eventually(lambda: [worker.cancelled for worker in over.workers[:2]] == [1, 1])
        assert over.metric("hedges_total", outcome="won") == 1


async def test_crash_of_the_suspect_leaves_the_second_attempt_running() -> None:
    async with harness(Script(silent_at=5, close_at=5), Script(resumed_delay_seconds=0.3)) as over:
        assert (await run_with_two_attempts(over)).text() == TEXT
        assert len(over.workers[1].requests) == 1


@pytest.mark.slow
async def test_slow_client_is_no_silent_worker() -> None:
    async with harness(Script(tokens=3), Script()) as over:
        over.client.write_seconds = 0.8
        assert (await over.run(BODY)).text() == text_of(BODY, 3)
        assert not over.workers[1].requests


@pytest.mark.parametrize("before_open", [True, False])
async def test_refusal_of_the_second_attempt_leaves_the_first_one_running(before_open: bool) -> None:
    """The first worker was only silent, so the request is not to end by what the second one answers."""
    first = Script(open_delay_seconds=0.9) if before_open else Script(silent_at=5)
    async with harness(first, Script(refuse=error_frame(500, "engine_error", retryable=False))) as over:
        assert (await run_with_two_attempts(over, 0.1)).text() == TEXT
        assert over.metric("hedges_total", outcome="failed") >= 1


async def test_crashes_of_further_workers_leave_a_slow_stream_running() -> None:
    crash = Script(refuse=error_frame(500, "engine_error", retryable=True))
    async with harness(Script(silent_at=5), crash, crash, crash) as over:
        task = asyncio.create_task(over.run(BODY))
        await eventually(lambda: over.workers[1].requests and over.workers[2].requests)
        await asyncio.sleep(0.6)
        assert not over.workers[3].requests, "the request may be the cause, so it is not given to a third one"
        over.workers[0].voice.set()
        assert (await task).text() == TEXT


async def test_refusals_of_all_attempts_end_the_request() -> None:
    refused = error_frame(400, "invalid_value", retryable=False)
    async with harness(Script(open_delay_seconds=0.9, refuse=refused, refuse_at=1), Script(refuse=refused)) as over:
        with pytest.raises(RefusedByWorker):
            await over.run(BODY)


async def test_a_winner_whose_client_reads_slowly_is_not_hedged() -> None:
    async with harness(Script(silent_at=5), Script()) as over:
        relay = over.relay(BODY)
        task = asyncio.create_task(relay.run())
        await eventually(lambda: len(over.client.events) >= 6)
        over.client.write_seconds = 30
        await asyncio.sleep(0.9)
        assert [attempt.is_paused for attempt in relay._running.values()] == [True]
        relay._wake.set()  # as the end of the loser of the first hedge does
        await asyncio.sleep(0.1)
        assert len(relay._running) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


# --- a request that lost its worker: how long it waits for another one, and that the operator learns of it ------------

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
        await eventually(lambda: len(over.client.events) == 5)
        over.registry.update([])
        over.scripts[0].close_at = 5
        over.workers[0].voice.set()
        await eventually(lambda: over.registry.demand[0] == 1)
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
        await eventually(lambda: over.registry.counts()["suspect"] == 1)
        assert over.registry.demand == (0, 0.0), "the worker may answer again"
        with pytest.raises(ApiError):
            await task


async def test_a_stream_waits_for_a_place_at_a_full_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_history, "_EXCLUDE_SECONDS", 0.1)
    async with harness(Script(move_at=9), Script(refuse=FULL)) as over:
        task = asyncio.create_task(over.run(BODY))
        await eventually(lambda: len(over.workers[1].requests) == 3)
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
        await eventually(lambda: router.workers[0].running)
        endpoints = workers.endpoints
        workers.update([])
        router.workers[0].script.close_at = 0
        await eventually(lambda: demand.held[-1][0] == 1)
        router.workers[0].script.close_at = None
        workers.update(endpoints)
        _, _, content = await sent
        assert content.endswith(b"[DONE]\n\n")
        await eventually(lambda: demand.held[-1] == (0, 0.0))


async def test_prefixes_of_a_worker_that_is_gone_are_dropped() -> None:
    async with router_over(Script(), Script()) as router:
        prefixes, workers = router.state.placement.prefixes, router.state.relay.workers
        first, second = workers.endpoints
        prefixes._retention = {first.name: 0.5, second.name: 0.5}
        workers.update([second])
        assert set(prefixes._retention) == {second.name}
