"""Deadlines of requests, by header and by default, waiting and running, of the time in the queue; and fair shares."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from support.faults.bounds import SHORT_BEHIND_LONG_SECONDS, assert_ttft_unaffected, healthy, ttft_seconds
from support.faults.raw_clients import Client, deaf_client
from support.faults.workers import SMALL_FLAGS
from support.processes import cpu_seconds
from support.worker_process import WorkerProcess, ready, real

EXTRA_SECONDS = 1.0
"""Bound of the time from a deadline to the response, which includes the step under way."""
STEP_SECONDS = 0.02
LONG = {"model": "small", "prompt": "hello", "max_tokens": 240, "temperature": 0, "ignore_eos": True}
"""Request of about five seconds, longer than every deadline here."""
DEFAULT_SECONDS, QUEUE_SECONDS = 3.0, 1.5


@pytest.fixture(scope="module")
def slow_worker(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """Yield a worker with slow steps and short deadlines. Four requests fit into its batch."""
    times = ("--request-timeout-seconds", str(DEFAULT_SECONDS), "--queue-timeout-seconds", str(QUEUE_SECONDS))
    flags = ("--model", f"file://{small_folder}", *SMALL_FLAGS, *times)
    knobs = {"SPECDECODE_SYNTHETIC": json.dumps({"step_time": [{"seconds": STEP_SECONDS}]})}
    with ready(real(flags, tmp_path_factory.mktemp("worker") / "worker.log", knobs)) as worker:
        yield worker


def complete(worker: WorkerProcess, timeout: str | None = None, **fields: object) -> tuple[httpx.Response, float]:
    """Send the long request with further fields, and return the response and its time in seconds."""
    headers = {} if timeout is None else {"X-Request-Timeout": timeout}
    began = time.monotonic()
    answer = httpx.post(f"{worker.public}/v1/completions", json=LONG | fields, headers=headers, timeout=60)
    return answer, time.monotonic() - began


def assert_ended(answer: httpx.Response, status: int, code: str) -> None:
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text


def wait_idle(worker: WorkerProcess) -> None:
    worker.wait_until(lambda: (now := worker.report()).running == now.waiting == now.kv_tokens_used == 0, EXTRA_SECONDS)


def assert_in_time(what: str, seconds: float, deadline: float) -> None:
    print(f"{what}: answered after {seconds:.2f} s, deadline {deadline} s")
    assert deadline - 0.05 <= seconds <= deadline + EXTRA_SECONDS


def test_header_cancels_a_running_request(slow_worker: WorkerProcess) -> None:
    with healthy(slow_worker):
        answer, seconds = complete(slow_worker, "0.5")
    assert_ended(answer, 504, "deadline_exceeded")
    assert answer.headers["X-Should-Retry"] == "false"
    assert_in_time("running request", seconds, 0.5)
    wait_idle(slow_worker)


def test_deadline_of_a_stream_is_its_last_event(slow_worker: WorkerProcess) -> None:
    answer, seconds = complete(slow_worker, "0.5", stream=True)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
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
        assert_ended(answer, 504, "deadline_exceeded")
        assert_in_time("waiting request with a header", seconds, 0.5)
        answer, seconds = without.result()
        assert_ended(answer, 503, "queue_timeout")
        assert int(answer.headers["Retry-After"]) >= 1
        assert_in_time("waiting request without a header", seconds, QUEUE_SECONDS)
        for one in running:
            answer, seconds = one.result()
            assert_ended(answer, 504, "deadline_exceeded")
            assert_in_time("running request without a header", seconds, DEFAULT_SECONDS)
    wait_idle(slow_worker)


FAIRNESS_STEP_SECONDS = 0.1
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
    flags = ("--max-waiting", str(MAX_WAITING), "--api-keys-path", str(keys), "--api-key-metrics")
    knobs = {"SPECDECODE_SYNTHETIC": json.dumps({"step_time": [{"seconds": FAIRNESS_STEP_SECONDS}]})}
    words = ("--model", f"file://{small_folder}", *SMALL_FLAGS, *flags)
    with ready(real(words, tmp_path / "worker.log", knobs)) as worker:
        yield worker


def key_of(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer secret-{name}"}


def test_a_flooding_client_does_not_delay_another(keyed_worker: WorkerProcess) -> None:
    quiet = {"model": "small", "headers": key_of("quiet")}
    limits = httpx.Limits(max_connections=2 * FLOOD)
    flood = httpx.Client(base_url=keyed_worker.public, headers=key_of("flood"), limits=limits, timeout=120)
    idle = ttft_seconds(keyed_worker, **quiet)
    with flood, ThreadPoolExecutor(FLOOD) as pool, healthy(keyed_worker):
        sent = [pool.submit(flood.post, "/v1/completions", json=BODY | {"max_tokens": 4}) for _ in range(FLOOD)]
        time.sleep(0.5)
        measured = [ttft_seconds(keyed_worker, **quiet) for _ in range(3)]
        unfinished = sum(not one.done() for one in sent)
        statuses = [one.result().status_code for one in sent]
    print(f"{unfinished} requests of the flood unfinished; answers: { {one: statuses.count(one) for one in statuses} }")
    assert unfinished > 4, "the flood ended too early to delay anything"
    assert set(statuses) == {200, 429}, "the flood fills its share of the queue"
    metrics = [line for line in keyed_worker.get("/metrics").text.splitlines() if 'api_key="quiet"' in line]
    print(*(line for line in metrics if "first_token" in line and "_bucket" not in line), sep="\n")
    assert any(line.startswith("specdecode_api_key_request_success_total") for line in metrics)
    for one in measured:
        assert_ttft_unaffected(idle, one)


LONG_TOKENS = 6_000
SHORT = {"model": "smollm2", "prompt": "The sky is", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def send_long_prompt(worker: WorkerProcess, index: int) -> Client:
    """Send a prompt that shares no prefix with the others. The request ends when the connection is closed."""
    prompt = [1_000 + index, *((7 * position + index) % 4_000 + 300 for position in range(LONG_TOKENS - 1))]
    return deaf_client(worker.public, "/v1/completions", SHORT | {"prompt": prompt, "max_tokens": 1})


def complete_seconds(worker: WorkerProcess, prompt: str) -> float:
    began = time.monotonic()
    answer = httpx.post(f"{worker.public}/v1/completions", json=SHORT | {"prompt": prompt}, timeout=240)
    assert answer.status_code == 200, answer.text
    return time.monotonic() - began


@pytest.mark.proof("faults")  # holds a duration to a bound, so nothing may run beside it
def test_short_request_behind_long_prompts(embedded_worker: WorkerProcess) -> None:
    """The latency of the short request stays bounded, and the long prompts still make progress."""
    engine_pid = embedded_worker.engine_pid
    alone = complete_seconds(embedded_worker, "The sky is")
    with contextlib.ExitStack() as open_connections, healthy(embedded_worker):
        for index in range(2):
            open_connections.enter_context(contextlib.closing(send_long_prompt(embedded_worker, index)))
        time.sleep(1)
        used, used_cpu = embedded_worker.report().kv_tokens_used, cpu_seconds(engine_pid)
        behind = complete_seconds(embedded_worker, "The grass is")
        after, used_cpu = embedded_worker.report(), cpu_seconds(engine_pid) - used_cpu
    print(
        f"short request: {alone:.2f} s alone, {behind:.2f} s behind long prompts ({used_cpu:.1f} s CPU of the engine)"
    )
    print(f"tokens in the cache: {used} before the short request, {after.kv_tokens_used} after it")
    embedded_worker.wait_until(lambda: not embedded_worker.report().running, 60)
    assert after.running + after.waiting == 2, "the prompts were not long enough to delay anything"
    assert after.kv_tokens_used > used, "long prompts make progress meanwhile"
    assert behind <= SHORT_BEHIND_LONG_SECONDS
