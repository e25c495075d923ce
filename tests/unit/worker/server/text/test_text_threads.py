"""Work on texts: threads that are bounded, by lane, and stopped with their caller, and texts that may be too long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_worker.server.admission import ModelLimits
from specdecode_worker.server.grammars import AnswerGrammars
from specdecode_worker.server.prompts import (
    SHORT_TEXT_CHARACTERS,
    Lane,
    PromptPreparation,
    TextThreads,
    TextTooLong,
    TextWorkStopped,
    encode_bounded,
    lane_of,
)
from specdecode_worker.server.requests import CompletionRequest
from specdecode_worker.server.tools import Tokenizer
from support.worker import tokens

MERGING = Tokenizer(tokens.tokenizer(merges=[("a", "a"), ("aa", "aa")], extra=("aa", "aaaa")), None)
"""Tokenizer with one token for up to four letters."""


@pytest.fixture
def threads() -> Iterator[TextThreads]:
    threads = TextThreads()
    yield threads
    threads.close()


def test_lane_follows_the_length() -> None:
    assert lane_of(SHORT_TEXT_CHARACTERS) is Lane.SHORT
    assert lane_of(SHORT_TEXT_CHARACTERS + 1) is Lane.LONG


async def test_short_work_does_not_wait_for_long_work(threads: TextThreads) -> None:
    release, running, most = threading.Event(), [0], [0]
    lock = threading.Lock()

    def long_work(_stopped: threading.Event) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        release.wait(10)
        with lock:
            running[0] -= 1

    long_tasks = [asyncio.create_task(threads.run(Lane.LONG, long_work)) for _ in range(6)]
    assert await asyncio.wait_for(threads.run(Lane.SHORT, lambda _stopped: "short"), 5) == "short"
    release.set()
    await asyncio.gather(*long_tasks)
    assert most[0] <= 2


async def test_cancelled_work_stops_and_waiting_work_never_begins(threads: TextThreads) -> None:
    began, ended = [0], threading.Event()

    def work(stopped: threading.Event) -> None:
        began[0] += 1
        assert stopped.wait(10)
        ended.set()

    tasks = [asyncio.create_task(threads.run(Lane.LONG, work)) for _ in range(5)]
    while began[0] < 2:
        await asyncio.sleep(0.01)
    for task in reversed(tasks):  # the waiting ones first: a thread that ends early would begin one of them
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await asyncio.to_thread(ended.wait, 5)
    assert began[0] == 2


async def test_close_stops_work(threads: TextThreads) -> None:
    began = threading.Event()

    def work(stopped: threading.Event) -> bool:
        began.set()
        return stopped.wait(10)

    task = asyncio.create_task(threads.run(Lane.SHORT, work))
    await asyncio.to_thread(began.wait, 5)
    threads.close()
    assert await asyncio.wait_for(task, 5)


async def test_client_that_leaves_while_its_grammar_gets_ready_is_not_served(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TextThreads.run

    async def run_and_leave(threads: TextThreads, lane: Lane, work: Callable[[threading.Event], Any]) -> Any:
        result = await run(threads, lane, work)
        if lane is Lane.GRAMMAR:
            preparing.cancel()
        return result

    monkeypatch.setattr(TextThreads, "run", run_and_leave)
    preparation = PromptPreparation(tokenizer, ModelLimits(64, 64), Mock(AnswerGrammars))
    body = CompletionRequest.model_validate({"model": "small", "prompt": [1, 2], "bad_words": ["no"]})
    preparing = asyncio.create_task(preparation.prompts(body))
    with pytest.raises(asyncio.CancelledError):
        await preparing
    preparation.close()


@given(text=st.text(alphabet="a b1", max_size=400), most=st.integers(4, 40))
@settings(deadline=None)
def test_texts_that_fit_are_never_refused(text: str, most: int) -> None:
    ids = MERGING.encode(text)
    try:
        assert encode_bounded(MERGING, text, most, threading.Event()) == ids
    except TextTooLong:
        assert len(ids) > most


def test_text_without_end_is_refused_after_a_beginning_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0

    def encode(text: str, **options: bool) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return Tokenizer.encode(MERGING, text, **options)

    monkeypatch.setattr(MERGING, "encode", encode)
    with pytest.raises(TextTooLong):
        encode_bounded(MERGING, "a" * 1_000_000, 100, threading.Event())
    assert longest <= 8 * 100 * 2, "four letters a token, twice the context, and one doubling"


def test_work_stops_once_it_is_cancelled() -> None:
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(TextWorkStopped):
        encode_bounded(MERGING, "a", 4, stopped)
