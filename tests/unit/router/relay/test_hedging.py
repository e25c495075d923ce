"""A silent worker gets a second attempt next to it; whichever delivers first wins, and no token comes twice."""

from __future__ import annotations

import asyncio
import time

import pytest

from specdecode_router.relay.client_stream import RefusedByWorker
from support.relay_harness import chat, harness, wait_until
from support.stand_in_worker import Script, error_frame, text_of

BODY = chat()
TEXT = text_of(BODY, 20)


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
        over.workers[0].voice.set()
        await wait_until(lambda: not over.workers[0].running)
        assert (over.workers[0].cancelled, over.workers[0].ended) == (1, 0), "the loser is cancelled"


async def test_loser_is_cancelled_while_the_winner_runs() -> None:
    async with harness(Script(silent_at=5), Script(tokens=10_000, interval_seconds=0.01)) as over:
        over.scripts[0].tokens = 10_000
        task = asyncio.create_task(over.run(BODY))
        await wait_until(lambda: over.workers[0].cancelled)
        assert over.workers[1].running
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_false_suspicion_changes_nothing() -> None:
    async with harness(Script(silent_at=5), Script(resumed_delay_seconds=30)) as over:
        task = asyncio.create_task(over.run(BODY))
        await wait_until(lambda: over.workers[1].requests)
        over.workers[0].voice.set()
        client = await task
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
        await wait_until(lambda: over.registry.counts()["suspect"])
        over.workers[0].voice.set()
        await wait_until(lambda: not over.registry.counts()["suspect"], 2)
        assert len(over.client.events) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_both_deliver_at_the_same_time() -> None:
    async with harness(Script(silent_at=5), Script(resumed_delay_seconds=0.05)) as over:
        task = asyncio.create_task(over.run(BODY))
        await wait_until(lambda: over.workers[1].requests)
        await asyncio.sleep(0.05)
        over.workers[0].voice.set()
        client = await task
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
        await wait_until(lambda: over.registry.counts()["suspect"])
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
        await wait_until(lambda: [worker.cancelled for worker in over.workers[:2]] == [1, 1])
        assert over.metric("hedges_total", outcome="won") == 1


async def test_crash_of_the_suspect_leaves_the_second_attempt_running() -> None:
    async with harness(Script(silent_at=5, close_at=5), Script(resumed_delay_seconds=0.3)) as over:
        task = asyncio.create_task(over.run(BODY))
        await wait_until(lambda: over.workers[1].requests)
        over.workers[0].voice.set()
        assert (await task).text() == TEXT
        assert len(over.workers[1].requests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("write_seconds", [0.8])
async def test_slow_client_is_no_silent_worker(write_seconds: float) -> None:
    async with harness(Script(tokens=3), Script()) as over:
        over.client.write_seconds = write_seconds
        assert (await over.run(BODY)).text() == text_of(BODY, 3)
        assert not over.workers[1].requests


@pytest.mark.parametrize("before_open", [True, False])
async def test_refusal_of_the_second_attempt_leaves_the_first_one_running(before_open: bool) -> None:
    """The first worker was only silent, so the request is not to end by what the second one answers."""
    first = Script(open_delay_seconds=0.9) if before_open else Script(silent_at=5)
    async with harness(first, Script(refuse=error_frame(500, "engine_error", retryable=False))) as over:
        task = asyncio.create_task(over.run(BODY))
        await wait_until(lambda: over.workers[1].requests)
        await asyncio.sleep(0.1)
        over.workers[0].voice.set()
        client = await task
        assert client.text() == TEXT
        assert over.metric("hedges_total", outcome="failed") >= 1


async def test_crashes_of_further_workers_leave_a_slow_stream_running() -> None:
    crash = Script(refuse=error_frame(500, "engine_error", retryable=True))
    async with harness(Script(silent_at=5), crash, crash, crash) as over:
        task = asyncio.create_task(over.run(BODY))
        await wait_until(lambda: over.workers[1].requests and over.workers[2].requests)
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
        await wait_until(lambda: len(over.client.events) >= 6)
        over.client.write_seconds = 30
        await asyncio.sleep(0.9)
        assert [attempt.is_paused for attempt in relay._running.values()] == [True]
        relay._wake.set()  # as the end of the loser of the first hedge does
        await asyncio.sleep(0.1)
        assert len(relay._running) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
