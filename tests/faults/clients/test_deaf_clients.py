"""Clients that stop reading keep neither a place in the queue nor the worker at its shutdown."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.faults import raw_clients
from support.faults.bounds import (
    MEMORY_BYTES,
    SIGTERM_EXTRA_SECONDS,
    assert_ttft_unaffected,
    healthy,
    resident_bytes,
    ttft_seconds,
)
from support.faults.fake_worker import ADMIN_HEADERS, MAX_NUM_SEQS, fake_worker
from support.worker_process import WorkerProcess

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
    idle, memory = ttft_seconds(worker, model="small"), resident_bytes(worker)
    with healthy(worker):
        request.getfixturevalue("deaf_clients")
        answers = [_short_answer(worker) for _ in range(10)]
        assert_ttft_unaffected(idle, ttft_seconds(worker, model="small"))
    growth = resident_bytes(worker) - memory
    print(f"answers beside four deaf clients: {answers}; {growth >> 20} MiB")
    assert set(answers) == {200}
    assert growth <= MEMORY_BYTES


def test_deaf_clients_do_not_use_the_grace_period(
    worker: WorkerProcess, deaf_clients: list[raw_clients.Client]
) -> None:
    began = time.monotonic()
    worker.terminate()
    exit_code = worker.exit_code(90)
    seconds = time.monotonic() - began
    closed = raw_clients.seconds_until_closed(dict.fromkeys(deaf_clients, began), seconds + 5)
    print(f"exit {exit_code} after {seconds:.1f} s, {len(closed)} of {CLIENTS} deaf clients cut off")
    assert seconds <= WRITE_TIMEOUT_SECONDS + SIGTERM_EXTRA_SECONDS
    assert exit_code == 0, worker.log
    assert len(closed) == CLIENTS
    assert "Traceback" not in worker.log


def _short_answer(worker: WorkerProcess) -> int:
    body = {"model": "small", "prompt": "hi", "max_tokens": 2}
    return httpx.post(f"{worker.public}/v1/completions", json=body, timeout=30).status_code


def _finished(worker: WorkerProcess) -> int:
    """Return the number of requests that the engine has finished and that generated the text of deaf clients."""
    report = httpx.get(f"{worker.admin}/v1/report", headers=ADMIN_HEADERS, timeout=10).json()
    return sum(cell["output_tokens"] for cell in report["traffic"]) // DEAF["max_tokens"]
