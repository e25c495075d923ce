"""Parts of the server process that must live: the worker ends when one of them ends with an exception."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import httpx

from support.worker import fake_engine
from support.worker_process import StartWorker, WorkerProcess

EXIT_SECONDS = 8.0
"""Time from the failure to the end of the worker."""


def assert_ends(worker: WorkerProcess, began: float, reason: str) -> None:
    assert worker.exit_code(EXIT_SECONDS) == 1, worker.log
    print(f"worker gone after {time.monotonic() - began:.1f} s: {worker.termination_message}")
    assert reason in worker.termination_message
    assert reason in worker.log


def complete(worker: WorkerProcess, prompt: object) -> None:
    body = {"model": "small", "prompt": prompt, "max_tokens": 4}
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{worker.public}/v1/completions", json=body, timeout=EXIT_SECONDS)


def test_dead_reader_task_ends_the_worker(start_fake: StartWorker) -> None:
    worker, began = start_fake(), time.monotonic()
    complete(worker, [fake_engine.UNREADABLE])
    assert_ends(worker, began, "reader of the engine's messages")


def test_dead_listener_ends_the_worker(start_fake: StartWorker, tmp_path: Path) -> None:
    trigger = tmp_path / "trigger"
    worker, began = start_fake(environment={"PLANTED_LISTENER_FAILURE": str(trigger)}), time.monotonic()
    trigger.touch()
    assert_ends(worker, began, "listener")
