"""Half-open requests are closed in time, and a flood of the open endpoints delays no stream."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import raw_clients
from bounds import (
    HALF_OPEN_SECONDS,
    MEMORY_BYTES,
    TTFT_EXTRA_SECONDS,
    TTFT_FACTOR,
    assert_ttft_unaffected,
    healthy,
    resident_bytes,
    ttft_seconds,
)
from conftest import StartWorker
from worker_process import WorkerProcess

SHORT_TIMEOUTS = ("--header-timeout-seconds", "2", "--body-timeout-seconds", "4")


@pytest.mark.parametrize(
    "flags", [pytest.param((), id="default", marks=pytest.mark.slow_fault), pytest.param(SHORT_TIMEOUTS, id="short")]
)
def test_half_open_requests_are_closed_and_delay_no_client(start_small: StartWorker, flags: tuple[str, ...]) -> None:
    worker = start_small(*flags)
    idle, memory = ttft_seconds(worker, model="small"), resident_bytes(worker)
    with contextlib.ExitStack() as stack, healthy(worker):
        began = time.monotonic()
        half_open = [
            stack.enter_context(raw_clients.half_open_post(worker.public, "/v1/completions")) for _ in range(300)
        ]
        half_open += [stack.enter_context(raw_clients.half_headers(url)) for url in (worker.public, worker.admin) * 10]
        half_open += [stack.enter_context(raw_clients.half_open_post(worker.admin, "/v1/plan")) for _ in range(10)]
        assert_ttft_unaffected(idle, ttft_seconds(worker, model="small"))
        closed = raw_clients.seconds_until_closed(half_open, began, HALF_OPEN_SECONDS)
    growth = resident_bytes(worker) - memory
    print(
        f"{len(closed)} of {len(half_open)} closed, the last after {max(closed, default=0):.1f} s; {growth >> 20} MiB"
    )
    assert len(closed) == len(half_open)
    assert growth <= MEMORY_BYTES


def test_steady_upload_is_served(small_worker: WorkerProcess) -> None:
    """A body that arrives within its time-out, a little at a time, is accepted."""

    def body() -> Iterator[bytes]:
        for piece in (b'{"model": "small", ', b'"prompt": "hello", ', b'"max_tokens": 2}'):
            yield piece
            time.sleep(0.5)

    answer = httpx.post(f"{small_worker.public}/v1/completions", content=body(), timeout=30)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/openapi.json", "/metrics"])
def test_flood_of_an_open_endpoint_does_not_stretch_a_stream(small_worker: WorkerProcess, path: str) -> None:
    alone = _stream_seconds(small_worker)
    with healthy(small_worker), _flood(small_worker.public + path, clients=4) as calls:
        began = time.monotonic()
        flooded = _stream_seconds(small_worker)
        elapsed = time.monotonic() - began
    print(f"{path}: stream {alone:.2f} s alone, {flooded:.2f} s in the flood of {len(calls) / elapsed:.0f} calls/s")
    assert flooded <= TTFT_FACTOR * alone + TTFT_EXTRA_SECONDS


def _stream_seconds(worker: WorkerProcess) -> float:
    """Return the duration of a stream of 240 tokens."""
    body = {"model": "small", "prompt": "a", "max_tokens": 240, "stream": True, "ignore_eos": True, "temperature": 0}
    began = time.monotonic()
    assert "[DONE]" in httpx.post(f"{worker.public}/v1/completions", json=body, timeout=120).text
    return time.monotonic() - began


@contextlib.contextmanager
def _flood(url: str, clients: int) -> Iterator[list[int]]:
    """Call ``url`` in a tight loop from each client, and yield the list of the statuses."""
    statuses: list[int] = []
    stop = threading.Event()

    def call() -> None:
        with httpx.Client(timeout=30) as client:
            while not stop.is_set():
                statuses.append(client.get(url).status_code)

    threads = [threading.Thread(target=call) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.3)
        yield statuses
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set(statuses) == {200}
