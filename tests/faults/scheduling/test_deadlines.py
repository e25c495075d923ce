"""Deadlines: of a request, by header and by default, waiting and running, and of the time in the queue."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from support.faults.bounds import healthy
from support.worker_process import WorkerProcess, real

EXTRA_SECONDS = 1.0
"""Bound of the time from a deadline to the response, which includes the step under way."""
STEP_SECONDS = 0.02
LONG = {"model": "small", "prompt": "hello", "max_tokens": 240, "temperature": 0, "ignore_eos": True}
"""Request of about five seconds, longer than every deadline here."""
DEFAULT_SECONDS, QUEUE_SECONDS = 3.0, 1.5


@pytest.fixture(scope="module")
def slow_worker(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """Yield a worker with slow steps and short deadlines. Four requests fit into its batch."""
    flags = ("--model", f"file://{small_folder}", "--served-model-name", "small", "--dtype", "float32",
             "--max-num-seqs", "4", "--kv-cache-tokens", "4096", "--request-timeout-seconds", str(DEFAULT_SECONDS),
             "--queue-timeout-seconds", str(QUEUE_SECONDS))  # fmt: skip
    knobs = {"SPECDECODE_SYNTHETIC": json.dumps({"step_time": [{"seconds": STEP_SECONDS}]})}
    with real(flags, tmp_path_factory.mktemp("worker") / "worker.log", knobs) as worker:
        worker.wait_ready()
        yield worker


def complete(worker: WorkerProcess, timeout: str | None = None) -> tuple[httpx.Response, float]:
    """Send the long request and return the response and its time in seconds."""
    headers = {} if timeout is None else {"X-Request-Timeout": timeout}
    began = time.monotonic()
    answer = httpx.post(f"{worker.public}/v1/completions", json=LONG, headers=headers, timeout=60)
    return answer, time.monotonic() - began


def wait_idle(worker: WorkerProcess) -> None:
    def is_idle() -> bool:
        report = worker.call_admin("/v1/report").json()
        return not report["running"] and not report["waiting"] and not report["kv_tokens_used"]

    worker.wait_until(is_idle, EXTRA_SECONDS)


def assert_in_time(what: str, seconds: float, deadline: float) -> None:
    print(f"{what}: answered after {seconds:.2f} s, deadline {deadline} s")
    assert deadline - 0.05 <= seconds <= deadline + EXTRA_SECONDS


def test_header_cancels_a_running_request(slow_worker: WorkerProcess) -> None:
    with healthy(slow_worker):
        answer, seconds = complete(slow_worker, "0.5")
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded"), answer.text
    assert answer.headers["X-Should-Retry"] == "false"
    assert_in_time("running request", seconds, 0.5)
    wait_idle(slow_worker)


def test_deadline_of_a_stream_is_its_last_event(slow_worker: WorkerProcess) -> None:
    began = time.monotonic()
    answer = httpx.post(
        f"{slow_worker.public}/v1/completions",
        json=LONG | {"stream": True},
        headers={"X-Request-Timeout": "0.5"},
        timeout=60,
    )
    seconds = time.monotonic() - began
    events = [
        json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    assert len(events) > 1, "the stream began before the deadline"
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in answer.text
    assert_in_time("stream", seconds, 0.5)
    wait_idle(slow_worker)


def test_deadlines_while_the_batch_is_full(slow_worker: WorkerProcess) -> None:
    """Four requests run until their default deadline; two more wait, one with a header and one without."""
    with ThreadPoolExecutor(6) as pool, healthy(slow_worker):
        running = [pool.submit(complete, slow_worker) for _ in range(4)]
        time.sleep(0.5)
        with_header, without = pool.submit(complete, slow_worker, "0.5"), pool.submit(complete, slow_worker)
        answer, seconds = with_header.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded"), answer.text
        assert_in_time("waiting request with a header", seconds, 0.5)
        answer, seconds = without.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_timeout"), answer.text
        assert int(answer.headers["Retry-After"]) >= 1
        assert_in_time("waiting request without a header", seconds, QUEUE_SECONDS)
        for one in running:
            answer, seconds = one.result()
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded"), answer.text
            assert_in_time("running request without a header", seconds, DEFAULT_SECONDS)
    wait_idle(slow_worker)


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "inf", "soon", ""])
def test_invalid_header_is_refused(slow_worker: WorkerProcess, timeout: str) -> None:
    answer = httpx.post(
        f"{slow_worker.public}/v1/completions", json=LONG, headers={"X-Request-Timeout": timeout}, timeout=60
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Timeout"), answer.text
