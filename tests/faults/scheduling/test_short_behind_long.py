"""A short request behind long prompts: its latency stays bounded, and the long prompts still make progress."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from support.faults.bounds import SHORT_BEHIND_LONG_SECONDS, healthy
from support.worker_process import WorkerProcess

LONG_TOKENS = 6_000
SHORT = {"model": "smollm2", "prompt": "The sky is", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def send_long_prompt(worker: WorkerProcess, index: int) -> socket.socket:
    """Send a prompt that shares no prefix with the others. The request ends when the connection is closed."""
    prompt = [1_000 + index, *((7 * position + index) % 4_000 + 300 for position in range(LONG_TOKENS - 1))]
    body = json.dumps(SHORT | {"prompt": prompt, "max_tokens": 1}).encode()
    url = urlsplit(worker.public)
    assert url.hostname
    assert url.port
    connection = socket.create_connection((url.hostname, url.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: worker\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    return connection


def complete_seconds(worker: WorkerProcess, prompt: str) -> float:
    began = time.monotonic()
    answer = httpx.post(f"{worker.public}/v1/completions", json=SHORT | {"prompt": prompt}, timeout=240)
    assert answer.status_code == 200, answer.text
    return time.monotonic() - began


def report(worker: WorkerProcess) -> dict[str, int]:
    return worker.call_admin("/v1/report", timeout=60).json()  # type: ignore[no-any-return]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, which depends less on other processes of the machine than its wall time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.proof("faults")  # holds a duration to a bound, so nothing may run beside it
def test_short_request_behind_long_prompts(embedded_worker: WorkerProcess) -> None:
    engine_pid = embedded_worker.engine_pid
    alone = complete_seconds(embedded_worker, "The sky is")
    with contextlib.ExitStack() as open_connections, healthy(embedded_worker):
        for index in range(2):
            open_connections.enter_context(contextlib.closing(send_long_prompt(embedded_worker, index)))
        time.sleep(1)
        used, used_cpu = report(embedded_worker)["kv_tokens_used"], cpu_seconds(engine_pid)
        behind = complete_seconds(embedded_worker, "The grass is")
        after, used_cpu = report(embedded_worker), cpu_seconds(engine_pid) - used_cpu
    print(
        f"short request: {alone:.2f} s alone, {behind:.2f} s behind long prompts ({used_cpu:.1f} s CPU of the engine)"
    )
    print(f"tokens in the cache: {used} before the short request, {after['kv_tokens_used']} after it")
    embedded_worker.wait_until(lambda: not report(embedded_worker)["running"], 60)
    assert after["running"] + after["waiting"] == 2, "the prompts were not long enough to delay anything"
    assert after["kv_tokens_used"] > used, "long prompts make progress meanwhile"
    assert behind <= SHORT_BEHIND_LONG_SECONDS
