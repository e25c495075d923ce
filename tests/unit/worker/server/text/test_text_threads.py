"""Tests of the threads for work on texts: bounded, by lane, and stopped with their caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from specdecode_worker.server.prompts import SHORT_TEXT_CHARACTERS, Lane, TextThreads, lane_of


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
