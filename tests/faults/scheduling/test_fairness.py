"""Fair share by API key: a client that floods the worker neither delays nor locks out another client."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.faults.bounds import assert_ttft_unaffected, healthy
from support.worker_process import WorkerProcess, real

STEP_SECONDS = 0.1
MAX_WAITING = 60
FLOOD = 100
"""Requests of the client that floods, more than the worker has places. Each takes four steps."""
BODY = {"model": "small", "prompt": "hello", "temperature": 0, "ignore_eos": True}


@pytest.fixture
def keyed_worker(small_folder: Path, tmp_path: Path) -> Iterator[WorkerProcess]:
    """Yield a worker with slow steps, four requests in a batch and the keys of two clients."""
    keys = tmp_path / "keys"
    keys.mkdir()
    for name in ("flood", "quiet"):
        (keys / name).write_text(f"secret-{name}")
    flags = (
        *("--model", f"file://{small_folder}", "--served-model-name", "small", "--dtype", "float32"),
        *("--max-num-seqs", "4", "--kv-cache-tokens", "4096", "--max-waiting", str(MAX_WAITING)),
        *("--api-keys-path", str(keys), "--api-key-metrics"),
    )
    knobs = {"SPECDECODE_SYNTHETIC": json.dumps({"step_time": [{"seconds": STEP_SECONDS}]})}
    with real(flags, tmp_path / "worker.log", knobs) as worker:
        worker.wait_ready()
        yield worker


def client_of(worker: WorkerProcess, name: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer secret-{name}"}
    limits = httpx.Limits(max_connections=2 * FLOOD)
    return httpx.Client(base_url=worker.public, headers=headers, limits=limits, timeout=120)


def ttft_seconds(client: httpx.Client) -> float:
    began = time.monotonic()
    with client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 2, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                return time.monotonic() - began
    raise AssertionError("the stream ended without an event")


def test_a_flooding_client_does_not_delay_another(keyed_worker: WorkerProcess) -> None:
    statuses: list[int] = []
    with client_of(keyed_worker, "flood") as flood, client_of(keyed_worker, "quiet") as quiet:

        def send() -> None:
            statuses.append(flood.post("/v1/completions", json=BODY | {"max_tokens": 4}).status_code)

        idle = ttft_seconds(quiet)
        threads = [threading.Thread(target=send) for _ in range(FLOOD)]
        with healthy(keyed_worker):
            for thread in threads:
                thread.start()
            time.sleep(0.5)
            measured = [ttft_seconds(quiet) for _ in range(3)]
            unfinished = sum(thread.is_alive() for thread in threads)
            for thread in threads:
                thread.join()
    print(f"{unfinished} requests of the flood unfinished; answers: { {one: statuses.count(one) for one in statuses} }")
    assert unfinished > 4, "the flood ended too early to delay anything"
    assert set(statuses) == {200, 429}, "the flood fills its share of the queue"
    metrics = [line for line in keyed_worker.get("/metrics").text.splitlines() if 'api_key="quiet"' in line]
    print(*(line for line in metrics if "first_token" in line and "_bucket" not in line), sep="\n")
    assert any(line.startswith("specdecode_api_key_request_success_total") for line in metrics)
    for one in measured:
        assert_ttft_unaffected(idle, one)
