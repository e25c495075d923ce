"""Hostile requests that the worker already survives: poison values, hang-ups and deeply nested JSON."""

from __future__ import annotations

import contextlib

import httpx
import pytest

from support.faults.bounds import healthy
from support.worker_process import WorkerProcess

COMPLETION = {"model": "small", "prompt": "hello", "max_tokens": 4, "temperature": 0}
POISON: tuple[dict[str, object], ...] = (
    {"temperature": -1},
    {"temperature": 1e308},
    {"top_p": 0},
    {"max_tokens": 1 << 62},
    {"max_tokens": -1},
    {"seed": 1 << 70},
    {"n": 1 << 30},
    {"prompt": [1 << 40]},
    {"prompt": [-1]},
    {"logit_bias": {"999999999": 100}},
    {"stop": ["x"] * 10_000},
    {"logprobs": 1 << 20},
)


@pytest.mark.parametrize("fields", POISON, ids=lambda fields: "-".join(fields))
def test_poison_values_are_refused_or_served(small_worker: WorkerProcess, fields: dict[str, object]) -> None:
    engine_pid = small_worker.engine_pid
    answer = httpx.post(f"{small_worker.public}/v1/completions", json=COMPLETION | fields, timeout=30)
    assert answer.status_code in (200, 400, 413, 422, 429), answer.text
    assert small_worker.engine_pid == engine_pid


@pytest.mark.parametrize("depth", [100, 100_000])
def test_deeply_nested_json_is_refused(small_worker: WorkerProcess, depth: int) -> None:
    body = b'{"prompt":' + b"[" * depth + b"]" * depth + b"}"
    with healthy(small_worker):
        answer = httpx.post(f"{small_worker.public}/v1/completions", content=body, timeout=30)
    assert answer.status_code == 400, answer.text


def test_hang_ups_free_the_engine(small_worker: WorkerProcess) -> None:
    body = COMPLETION | {"max_tokens": 200, "ignore_eos": True, "stream": True}
    with healthy(small_worker):
        for _ in range(20):
            with (
                contextlib.suppress(httpx.HTTPError),
                httpx.stream("POST", f"{small_worker.public}/v1/completions", json=body, timeout=30) as stream,
            ):
                next(stream.iter_lines())
        small_worker.wait_until(lambda: "specdecode_num_requests_running 0" in _metrics(small_worker), 20)


def _metrics(worker: WorkerProcess) -> str:
    return "\n".join(line.split("{")[0] + " " + line.rsplit(" ", 1)[1].removesuffix(".0")
                     for line in worker.get("/metrics").text.splitlines() if not line.startswith("#"))  # fmt: skip
