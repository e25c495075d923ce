"""The end of a worker: in time although threads are busy, and by itself after a drain."""

from __future__ import annotations

import contextlib
import threading
import time

import httpx

from support.faults.bounds import SIGTERM_EXTRA_SECONDS
from support.worker_process import StartWorker, WorkerProcess

GRACE_SECONDS = 2.0


def test_sigterm_with_busy_tokenizer_threads(start_fake: StartWorker) -> None:
    worker = start_fake(grace_period_seconds=GRACE_SECONDS, endpoint_delay_seconds=0)
    for _ in range(8):
        threading.Thread(target=_complete, args=(worker, "BUSY"), daemon=True).start()
    time.sleep(1)
    began = time.monotonic()
    worker.terminate()
    worker.exit_code(90)
    seconds = time.monotonic() - began
    print(f"exit {seconds:.1f} s after SIGTERM with {GRACE_SECONDS} s of grace")
    assert seconds <= GRACE_SECONDS + SIGTERM_EXTRA_SECONDS


def test_drained_worker_exits(start_fake: StartWorker) -> None:
    worker, began = start_fake(endpoint_delay_seconds=0.5), time.monotonic()
    assert worker.call_admin("/v1/drain", "POST").status_code == 202
    assert worker.exit_code(10) == 0, worker.log
    print(f"exit {time.monotonic() - began:.1f} s after the drain began")


def _complete(worker: WorkerProcess, prompt: str) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(
            f"{worker.public}/v1/completions", json={"model": "small", "prompt": prompt, "max_tokens": 4}, timeout=60
        )
