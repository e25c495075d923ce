"""Half-open requests are closed in time; floods and clients that do not read delay no stream of others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from specdecode_worker.server.service import SHARE_SECONDS
from support.client_threads import ClientThreads
from support.faults import raw_clients
from support.faults.bounds import (
    HALF_OPEN_SECONDS,
    SIGTERM_EXTRA_SECONDS,
    TTFT_EXTRA_SECONDS,
    TTFT_FACTOR,
    assert_ttft_unaffected,
    healthy,
    ttft_seconds,
    unaffected,
)
from support.faults.workers import MAX_NUM_SEQS, fake_worker
from support.worker_process import WorkerProcess

SHORT_TIMEOUTS = ("--header-timeout-seconds", "2", "--body-timeout-seconds", "4")
FLOOD_CLIENTS = 4
MAX_FLOOD_CALLS_PER_SECOND = 1.25 * FLOOD_CLIENTS / SHARE_SECONDS
"""Each client in a tight loop waits for an answer that all share; the factor is for the edges of the measurement."""


@pytest.fixture(scope="module")
def fast_worker(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """Yield a worker whose engine costs nothing, so that the server is what limits it."""
    with fake_worker(small_folder, tmp_path_factory.mktemp("worker") / "log") as started:
        yield started


@pytest.mark.parametrize(
    "flags",
    [pytest.param((), id="default", marks=pytest.mark.proof("faults")), pytest.param(SHORT_TIMEOUTS, id="short")],
)
def test_half_open_requests_are_closed_and_delay_no_client(
    start_small: Callable[..., WorkerProcess], flags: tuple[str, ...]
) -> None:
    worker = start_small(*flags)
    with contextlib.ExitStack() as stack, unaffected(worker) as idle:
        half_open = {stack.enter_context(opened): began for opened, began in _half_open_connections(worker)}
        assert_ttft_unaffected(idle, ttft_seconds(worker, model="small"))
        raw_clients.assert_closed(half_open, HALF_OPEN_SECONDS)


def _half_open_connections(worker: WorkerProcess) -> Iterator[tuple[raw_clients.Client, float]]:
    """Open half-open requests on both ports, and yield each with the time at which it was opened."""
    yield from raw_clients.half_open_requests(worker.public)
    for _ in range(10):
        yield raw_clients.half_headers(worker.admin), time.monotonic()
        yield raw_clients.half_open_post(worker.admin, "/v1/plan"), time.monotonic()


def test_steady_upload_is_served(fast_worker: WorkerProcess) -> None:
    """A body that arrives within its time-out, a little at a time, is accepted."""

    def body() -> Iterator[bytes]:
        for piece in (b'{"model": "small", ', b'"prompt": "hello", ', b'"max_tokens": 2}'):
            yield piece
            time.sleep(0.5)

    answer = httpx.post(f"{fast_worker.public}/v1/completions", content=body(), timeout=30)
    assert answer.status_code == 200, answer.text


class Flood(ClientThreads):
    """Clients that call a URL in a tight loop."""

    def __init__(self, url: str) -> None:
        super().__init__(FLOOD_CLIENTS, join_seconds=30)
        self._url, self._client = url, httpx.Client(timeout=30)

    def _ask(self, number: int) -> str:
        status = self._client.get(self._url).status_code
        return "" if status == 200 else f"status {status}"


@pytest.mark.parametrize("path", ["/openapi.json", "/metrics"])
def test_flood_of_an_open_endpoint_does_not_stretch_a_stream(fast_worker: WorkerProcess, path: str) -> None:
    alone = _stream_seconds(fast_worker)
    with healthy(fast_worker), Flood(fast_worker.public + path) as flood:
        flood.wait_for_answers(FLOOD_CLIENTS)
        began, calls_before = time.monotonic(), flood.answered
        flooded = _stream_seconds(fast_worker)
        elapsed = time.monotonic() - began
        calls_per_second = (flood.answered - calls_before) / elapsed
    print(f"{path}: stream {alone:.2f} s alone, {flooded:.2f} s in the flood of {calls_per_second:.0f} calls/s")
    assert flood.failures == []
    assert flooded <= TTFT_FACTOR * alone + TTFT_EXTRA_SECONDS
    assert calls_per_second <= MAX_FLOOD_CALLS_PER_SECOND


def _stream_seconds(worker: WorkerProcess) -> float:
    """Return the mean duration of streams of 240 tokens, repeated for two seconds."""
    began, streams = time.monotonic(), 0
    while time.monotonic() - began < 2:
        assert "[DONE]" in worker.complete("SAY:" + "x" * 240, max_tokens=240, stream=True, timeout=120).text
        streams += 1
    return (time.monotonic() - began) / streams


MAX_WAITING = 4
CLIENTS = 4
DEAF = {
    "model": "small",
    "prompt": "SAY:" + "x" * 240,
    "max_tokens": 240,
    "stream": True,
    "logprobs": 20,
    "n": (MAX_NUM_SEQS + MAX_WAITING) // CLIENTS,
}
"""Request with some megabytes of output. The requests of all clients together fill the queue."""
WRITE_TIMEOUT_SECONDS = 4


@pytest.fixture
def worker(small_folder: Path, tmp_path: Path) -> Iterator[WorkerProcess]:
    fields = {"max_waiting": MAX_WAITING, "grace_period_seconds": 60, "write_timeout_seconds": WRITE_TIMEOUT_SECONDS}
    with fake_worker(small_folder, tmp_path / "log", **fields) as started:
        yield started


@pytest.fixture
def deaf_clients(worker: WorkerProcess) -> Iterator[list[raw_clients.Client]]:
    """Yield clients whose answers are generated and not read."""
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(raw_clients.deaf_client(worker.public, "/v1/completions", DEAF)) for _ in range(CLIENTS)
        ]
        worker.wait_until(lambda: _finished(worker) == MAX_NUM_SEQS + MAX_WAITING, 60)
        yield clients


def test_deaf_clients_keep_no_place_in_the_queue(worker: WorkerProcess, request: pytest.FixtureRequest) -> None:
    with unaffected(worker):
        request.getfixturevalue("deaf_clients")
        answers = [worker.complete(timeout=30) for _ in range(10)]
    assert {answer.status_code for answer in answers} == {200}


def test_deaf_clients_do_not_use_the_grace_period(
    worker: WorkerProcess, deaf_clients: list[raw_clients.Client]
) -> None:
    began = time.monotonic()
    worker.terminate()
    exit_code = worker.exit_code(90)
    seconds = time.monotonic() - began
    print(f"exit {exit_code} after {seconds:.1f} s")
    raw_clients.assert_closed(dict.fromkeys(deaf_clients, began), seconds + 5)
    assert seconds <= WRITE_TIMEOUT_SECONDS + SIGTERM_EXTRA_SECONDS
    assert exit_code == 0, worker.log
    assert "Traceback" not in worker.log


def _finished(worker: WorkerProcess) -> int:
    """Return the number of requests that the engine has finished and that generated the text of deaf clients."""
    return sum(cell.output_tokens for cell in worker.report().traffic) // DEAF["max_tokens"]
