"""Measurements that the fault tests hold to a bound. The bounds are those of docs/reference/security-model.md."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import httpx

from support import processes
from support.percentile import percentile
from support.tiers import crowding, starved_seconds
from support.waiting import until
from support.worker_process import ServerProcess

HEALTH_P99_SECONDS = 0.5
"""Bound of the 99th percentile of the latency of ``/health`` during every fault."""
TTFT_FACTOR, TTFT_EXTRA_SECONDS = 2.0, 1.0
"""Bound of the time to first token of unaffected clients: twice that of an idle server plus one second."""
HUNG_ENGINE_EXTRA_SECONDS = 30
"""Time from the bound of a step to the end of a worker whose engine hangs."""
HALF_OPEN_SECONDS = 30
"""Time after which a half-open connection is closed."""
SHORT_BEHIND_LONG_SECONDS = 4
"""Bound of the latency of a short request behind long prompts."""
SIGTERM_EXTRA_SECONDS = 5
"""Time from the end of the grace period to the end of the process."""
MEMORY_BYTES = 500 * 1024 * 1024
"""Bound of the resident memory of server and engine above that of the idle worker."""


@contextlib.contextmanager
def healthy(server: ServerProcess) -> Iterator[None]:
    """Assert that ``/health``, called 20 times a second, stays 200 and within its bound while the block runs.

    A failed call counts as 10 s. Time for which client or server were ready to run, but other processes had the
    processors, does not count.
    """
    latencies_seconds, statuses, ended = list[float](), set[int](), threading.Event()

    def sample() -> None:
        tasks = (str(server.process.pid), f"self/task/{threading.get_native_id()}")
        with httpx.Client(timeout=10) as client:
            while not ended.wait(0.05) or not latencies_seconds:
                began, starved = time.monotonic(), sum(map(starved_seconds, tasks))
                try:
                    statuses.add(client.get(f"{server.public}/health").status_code)
                    starved = sum(map(starved_seconds, tasks)) - starved
                    latencies_seconds.append(max(0.0, time.monotonic() - began - starved))
                except httpx.HTTPError:
                    latencies_seconds.append(10.0)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    p99_seconds = percentile(latencies_seconds, 99)
    print(f"/health p99 {p99_seconds:.3f} s of {len(latencies_seconds)} calls")
    assert statuses == {200}, statuses
    assert p99_seconds <= HEALTH_P99_SECONDS


def ttft_seconds(
    server: ServerProcess, *, model: str, timeout: float = 120, headers: dict[str, str] | None = None
) -> float:
    """Return the time to the first event with text of a short streamed completion, in seconds."""
    body = {"model": model, "prompt": "The sky is", "max_tokens": 4, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    asked = {"json": body, "headers": headers, "timeout": timeout}
    began = time.monotonic()
    with httpx.stream("POST", f"{server.public}/v1/completions", **asked) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                return time.monotonic() - began
    raise AssertionError("the stream ended without an event")


def assert_ttft_unaffected(idle_seconds: float, measured_seconds: float) -> None:
    """Assert the bound of the time to first token of an unaffected client."""
    print(f"time to first token: {idle_seconds:.2f} s idle, {measured_seconds:.2f} s during the fault")
    assert measured_seconds <= (TTFT_FACTOR * idle_seconds + TTFT_EXTRA_SECONDS) * crowding()


@contextlib.contextmanager
def unaffected(server: ServerProcess) -> Iterator[float]:
    """Hold health, memory and the other clients' time to first token to their bounds while the block runs.

    Yield the time to first token before it, in seconds.
    """
    idle, memory = ttft_seconds(server, model="small"), resident_bytes(server)
    with healthy(server):
        yield idle
        assert_ttft_unaffected(idle, ttft_seconds(server, model="small"))
    growth = resident_bytes(server) - memory
    print(f"{growth >> 20} MiB")
    assert growth <= MEMORY_BYTES


def resident_bytes(server: ServerProcess) -> int:
    """Return the resident memory of all processes of a server in bytes."""
    return sum(map(processes.resident_bytes, server.pids))


def seconds_until(condition: Callable[[], object], limit_seconds: float) -> float:
    """Return the time until ``condition`` is true, and fail after ``limit_seconds``."""
    began = time.monotonic()
    until(condition, limit_seconds)
    return time.monotonic() - began
