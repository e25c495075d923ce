"""Errors after which the device cannot be used: the engine process ends at once, wherever they are raised."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from specdecode_worker.contract import Plan
from support.faults.bounds import has_ended
from support.worker import fake_engine
from support.worker_process import StartWorker, WorkerProcess

EXIT_SECONDS = 8.0
"""Time from the error to the end of the worker: one second for probes, the rest for clients and noise."""


def put_plan(worker: WorkerProcess, folder: Path) -> None:
    plan = Plan(uid="uid-1", version=9, max_depth=fake_engine.STICKY_DEPTH)
    worker.call_admin("/v1/plan", "PUT", content=plan.model_dump_json(), timeout=EXIT_SECONDS)


def put_draft(worker: WorkerProcess, folder: Path) -> None:
    draft = {"method": "eagle3", "uri": fake_engine.write_draft(folder, fake_engine.STICKY_DRAFT.strip("/"))}
    assert worker.call_admin("/v1/draft", "PUT", json=draft, timeout=EXIT_SECONDS).status_code == 202


def run_step(worker: WorkerProcess, folder: Path) -> None:
    body = {"model": "small", "prompt": [fake_engine.STICKY_STEP], "max_tokens": 4}
    httpx.post(f"{worker.public}/v1/completions", json=body, timeout=EXIT_SECONDS)


@pytest.mark.parametrize("provoke", [put_plan, put_draft, run_step])
def test_sticky_device_error_ends_the_worker(
    start_fake: StartWorker, provoke: Callable[[WorkerProcess, Path], None], tmp_path: Path
) -> None:
    worker = start_fake()
    assert worker.admin_token
    engine_pid, began = worker.engine_pid, time.monotonic()
    with contextlib.suppress(httpx.HTTPError):
        provoke(worker, tmp_path)
    worker.wait_until(lambda: has_ended(engine_pid), EXIT_SECONDS)
    engine_seconds = time.monotonic() - began
    assert worker.exit_code(EXIT_SECONDS) == 1
    print(f"engine gone after {engine_seconds:.1f} s, worker after {time.monotonic() - began:.1f} s")
    assert engine_seconds < EXIT_SECONDS / 2
    assert fake_engine.STICKY_ERROR in worker.termination_message
