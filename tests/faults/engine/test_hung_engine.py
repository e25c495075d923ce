"""An engine that stops or hangs: the probes fail, the streams end, and the worker leaves with the facts."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from support.faults.bounds import HUNG_ENGINE_EXTRA_SECONDS
from support.processes import has_ended, spawned
from support.worker import fake_engine
from support.worker_process import StartWorker, WorkerProcess

STEP_TIMEOUT_SECONDS = 2.0
STREAMED = {"model": "small", "max_tokens": 200, "stream": True, "ignore_eos": True}


class OpenStream(threading.Thread):
    """A streamed completion; ``text`` is all that arrived until the stream ended."""

    def __init__(self, worker: WorkerProcess, prompt: object) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self._url, self._body = f"{worker.public}/v1/completions", {**STREAMED, "prompt": prompt}
        self.start()

    def run(self) -> None:
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", self._url, json=self._body, timeout=60) as response,
        ):
            for piece in response.iter_text():
                self.text += piece


@contextlib.contextmanager
def suspended(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def assert_leaves_in_time(worker: WorkerProcess, began: float) -> None:
    """Assert that ``/ready`` fails before ``/health``, and that the worker exits 1 within the bound."""
    seconds: dict[str, float] = {}
    while worker.process.poll() is None and time.monotonic() - began < STEP_TIMEOUT_SECONDS + HUNG_ENGINE_EXTRA_SECONDS:
        for path in ("/ready", "/health"):
            with contextlib.suppress(httpx.HTTPError):
                if worker.get(path).status_code == 503:
                    seconds.setdefault(path, time.monotonic() - began)
        time.sleep(0.02)
    gone_seconds = time.monotonic() - began
    print(f"503 after {seconds}, gone after {gone_seconds:.1f} s of {STEP_TIMEOUT_SECONDS} s")
    assert worker.process.poll() == 1, f"after {gone_seconds:.1f} s: {worker.log}"
    assert seconds["/ready"] < STEP_TIMEOUT_SECONDS <= seconds["/health"]


def test_stopped_engine_ends_the_worker(start_small: StartWorker) -> None:
    worker = start_small("--step-timeout-seconds", str(STEP_TIMEOUT_SECONDS))
    stream = OpenStream(worker, "hello")
    worker.wait_until(lambda: bool(stream.text))
    engine_pid, began = worker.engine_pid, time.monotonic()
    with suspended(engine_pid):
        assert_leaves_in_time(worker, began)
    assert not Path(f"/proc/{engine_pid}").exists()
    stream.join(5)
    print(worker.termination_message)
    assert '"code":"engine_error"' in stream.text
    for fact in ("phase step", "rows", "prefill tokens", "no stacks", "stopped"):
        assert fact in worker.termination_message, worker.termination_message


def test_hang_in_python_is_reported_with_stacks(start_fake: StartWorker) -> None:
    worker = start_fake(step_timeout_seconds=STEP_TIMEOUT_SECONDS)
    idle_until = time.monotonic() + 0.75 * STEP_TIMEOUT_SECONDS
    while time.monotonic() < idle_until:
        assert worker.get("/ready").status_code == 200, "an idle engine beats"
        time.sleep(0.1)
    stream, began = OpenStream(worker, [fake_engine.HANG]), time.monotonic()
    assert_leaves_in_time(worker, began)
    stream.join(5)
    print(worker.termination_message)
    assert '"code":"engine_error"' in stream.text
    assert "hang_in_python" not in stream.text, "stacks are not for clients"
    assert worker.termination_message.startswith("the engine hangs")
    assert "hang_in_python" in worker.termination_message
    assert len(worker.termination_message.encode()) <= 4096


def test_slow_step_recovers(start_fake: StartWorker) -> None:
    worker = start_fake(step_timeout_seconds=fake_engine.SLOW_SECONDS * 1.6)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(worker.complete, [fake_engine.SLOW], max_tokens=3, timeout=30)
        worker.wait_until(lambda: worker.get("/ready").status_code == 503)
        assert worker.get("/health").status_code == 200
        worker.wait_ready(10)
    assert answer.result().status_code == 200


def test_slow_draft_swap_is_no_hang(start_fake: StartWorker, tmp_path: Path) -> None:
    worker = start_fake(step_timeout_seconds=1)
    draft = {"method": "eagle3", "uri": fake_engine.write_draft(tmp_path, fake_engine.SLOW_DRAFT.strip("/"))}
    assert worker.call_admin("/v1/draft", "PUT", json=draft).status_code == 202
    deadline = time.monotonic() + fake_engine.SLOW_SECONDS
    while time.monotonic() < deadline:
        answer = worker.get("/ready")
        assert answer.status_code == 200, answer.text
        time.sleep(0.05)


@pytest.mark.proof("faults")
def test_stopped_rank_ends_the_worker(start_small: StartWorker) -> None:
    worker = start_small("--step-timeout-seconds", str(STEP_TIMEOUT_SECONDS), "--tensor-parallel-size", "2")
    engine_pid = worker.engine_pid
    (rank_pid,) = spawned(engine_pid)
    stream = OpenStream(worker, "hello")
    worker.wait_until(lambda: bool(stream.text))
    began = time.monotonic()
    with suspended(rank_pid):
        assert_leaves_in_time(worker, began)
        print(worker.termination_message)
        assert has_ended(rank_pid), "the rank outlives its worker"
    assert "phase step" in worker.termination_message
