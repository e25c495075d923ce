"""Hostile texts, token ids and templates: each delays its own client only."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support import small_model
from support.faults.bounds import MEMORY_BYTES, assert_ttft_unaffected, healthy, resident_bytes, ttft_seconds
from support.faults.workers import EMBEDDED_FLAGS, SMALL_FLAGS
from support.worker_process import WorkerProcess, fake, ready, real, worker_config

CONTEXT = 32_768
SPECIAL_ID = 256
PAD, PAD_ID = "[PAD]", small_model.VOCAB_SIZE
REFUSAL_SECONDS = 1.0
"""Bound of the time in which a request that can never be served is refused."""
TEMPLATE_SECONDS = 12.0
"""Bound of the time in which three templates that do not end are stopped, on a machine that is busy with other work."""
TEMPLATE = (
    "{% set said = messages[0].content %}"
    "{% if said == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if said == 'output' %}{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endif %}"
    "{% if said == 'memory' %}{{ ('x' * 2000000000) | length }}{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """Yield a worker with a long context, a token without embedding and a template that obeys its messages."""
    folder = tmp_path_factory.mktemp("text")
    config = {"max_position_embeddings": CONTEXT, "num_hidden_layers": 2}
    small_model.write_target(folder, config=config, template=TEMPLATE, added=[PAD])
    flags = ["--model", f"file://{folder}", *SMALL_FLAGS, "--kv-cache-tokens", str(2 * CONTEXT), "--method", "ngram"]
    with ready(real([*flags, "--depth", "8"], folder / "worker.log")) as worker:
        ttft_seconds(worker, model="small")
        yield worker


@contextlib.contextmanager
def bounded(worker: WorkerProcess) -> Iterator[None]:
    """Hold ``/health``, the worker's memory and its engine process to their bounds while the block runs."""
    engine_pid, idle_bytes = worker.engine_pid, resident_bytes(worker)
    peak_bytes, stop = [idle_bytes], threading.Event()

    def sample() -> None:
        while not stop.wait(0.02):
            peak_bytes.append(resident_bytes(worker))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        with healthy(worker):
            yield
    finally:
        stop.set()
        sampler.join()
    extra = max(peak_bytes) - idle_bytes
    print(f"memory: {extra / 1e6:.0f} MB above idle")
    assert extra <= MEMORY_BYTES
    assert worker.engine_pid == engine_pid, worker.log


def post(worker: WorkerProcess, path: str, *, timeout: float = 60, **fields: Any) -> httpx.Response:
    return httpx.post(worker.public + path, json={"model": "small", **fields}, timeout=timeout)


def assert_refused(answer: httpx.Response, *words: str) -> None:
    assert answer.status_code == 400, answer.text[:500]
    message = answer.json()["error"]["message"]
    assert all(word in message for word in words), message


def test_echo_special_is_refused_at_once(worker: WorkerProcess) -> None:
    fields = {"prompt": [SPECIAL_ID] * 16_000, "max_tokens": CONTEXT, "echo": True, "logprobs": 0}
    assert _assert_refused_at_once(worker, "/v1/completions", fields, "maximum context length", 1) <= REFUSAL_SECONDS


def test_echo_special_of_clients_that_hung_up_delays_no_request(worker: WorkerProcess) -> None:
    idle_seconds = ttft_seconds(worker, model="small")
    fields = {"prompt": [SPECIAL_ID] * 8_000, "max_tokens": 1, "echo": True, "logprobs": 0}

    def hang_up() -> None:
        with contextlib.suppress(httpx.TimeoutException):
            post(worker, "/v1/completions", timeout=0.3, **fields)

    with bounded(worker):
        with concurrent.futures.ThreadPoolExecutor(6) as clients:
            for _ in range(6):
                clients.submit(hang_up)
        measured_seconds = ttft_seconds(worker, model="small", timeout=30)
    assert_ttft_unaffected(idle_seconds, measured_seconds)


def test_answer_special_delays_no_request(tmp_path: Path) -> None:
    """Answer with special tokens only, from a fake engine, because a model takes minutes for as many tokens."""
    small_model.write_tokenizer(tmp_path)
    environment = {"FAKE_MAX_MODEL_LEN": str(2 * CONTEXT)}
    with ready(fake(worker_config(tmp_path), tmp_path / "worker.log", environment)) as worker:
        idle_seconds = ttft_seconds(worker, model="small")
        fields = {"prompt": [20, 20, 20], "max_tokens": 30_000, "logprobs": 0, "n": 2}
        with bounded(worker), concurrent.futures.ThreadPoolExecutor(1) as clients:
            began = time.monotonic()
            answering = clients.submit(post, worker, "/v1/completions", timeout=250, **fields)
            measured_seconds = 0.0
            while not answering.done():
                measured_seconds = max(measured_seconds, ttft_seconds(worker, model="small"))
                time.sleep(0.1)
            answer = answering.result()
    assert answer.status_code == 200, answer.text[:500]
    print(f"{answer.json()['usage']['completion_tokens']} special tokens in {time.monotonic() - began:.1f} s")
    assert [choice["text"] for choice in answer.json()["choices"]] == ["", ""]
    assert_ttft_unaffected(idle_seconds, measured_seconds)


@pytest.mark.parametrize(
    ("path", "characters"),
    [
        ("/v1/completions", 4_000_000),
        ("/v1/chat/completions", 4_000_000),
        ("/tokenize", 4_000_000),
        ("/v1/completions", 290_000),
    ],
    ids=str,
)
def test_huge_text_is_refused_at_once(worker: WorkerProcess, path: str, characters: int) -> None:
    text = "0123456789" * (characters // 10)
    fields = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    seconds = _assert_refused_at_once(worker, path, fields, "context length", 4)
    assert seconds <= 4 * REFUSAL_SECONDS


def test_many_messages_are_refused_at_once(worker: WorkerProcess) -> None:
    fields = {"messages": [{"role": "user", "content": ""}] * 120_000}
    _assert_refused_at_once(worker, "/v1/chat/completions", fields, "at most 4096 messages", 4)


def _assert_refused_at_once(worker: WorkerProcess, path: str, fields: dict[str, Any], reason: str, count: int) -> float:
    """Assert that requests at once are refused and delay no other one. Return the time of the refusals."""
    body = {"model": "small", **fields}
    content, idle_seconds = json.dumps(body).encode(), ttft_seconds(worker, model=body["model"])
    with bounded(worker), concurrent.futures.ThreadPoolExecutor(count) as clients:
        began = time.monotonic()
        asked = {"content": content, "timeout": 60}
        refusing = [clients.submit(httpx.post, worker.public + path, **asked) for _ in range(count)]
        measured_seconds = ttft_seconds(worker, model=body["model"])
        answers = [one.result() for one in refusing]
        seconds = time.monotonic() - began
    print(f"{path}: {count} refused after {seconds:.2f} s")
    for answer in answers:
        assert_refused(answer, reason)
    assert_ttft_unaffected(idle_seconds, measured_seconds)
    return seconds


@pytest.mark.proof("faults")
def test_huge_text_with_a_real_tokenizer(tmp_path: Path) -> None:
    with ready(real(EMBEDDED_FLAGS, tmp_path / "worker.log")) as worker:
        ttft_seconds(worker, model="smollm2")
        for characters in (4_000_000, 600_000):
            fields = {"model": "smollm2", "prompt": "0123456789" * (characters // 10)}
            _assert_refused_at_once(worker, "/v1/completions", fields, "context length", 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [PAD_ID]},
        {"prompt": f"hello{PAD}"},
        {"prompt": "hello", "logit_bias": {str(PAD_ID): 5}},
        {"prompt": "hello", "stop_token_ids": [PAD_ID]},
        {"messages": [{"role": "user", "content": PAD}]},
    ],
    ids=["id", "text", "logit_bias", "stop_token_ids", "chat"],
)
def test_out_of_vocabulary_is_refused_by_name(worker: WorkerProcess, fields: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    with bounded(worker):
        answer = post(worker, path, max_tokens=2, **fields)
    assert_refused(answer, PAD, str(PAD_ID))
    assert "no embedding" in worker.log


@pytest.mark.parametrize("said", ["loop", "output", "memory"])
def test_template_loop_is_stopped(worker: WorkerProcess, said: str) -> None:
    fields = {"messages": [{"role": "user", "content": said}], "max_tokens": 1}
    seconds = _assert_refused_at_once(worker, "/v1/chat/completions", fields, "chat template", 3)
    assert seconds <= TEMPLATE_SECONDS
    chat = post(worker, "/v1/chat/completions", max_tokens=1, messages=[{"role": "user", "content": "hi"}])
    assert chat.status_code == 200, chat.text


def test_logprob_bomb_is_refused(worker: WorkerProcess) -> None:
    with bounded(worker):
        chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}
        answers = [
            post(worker, "/v1/chat/completions", **chat, n=128, timeout=20),
            post(worker, "/v1/chat/completions", **chat, n=4, max_tokens=30_000, timeout=20),
            post(worker, "/v1/completions", prompt="hi", n=128, max_tokens=30_000, logprobs=20, timeout=20),
        ]
    for answer in answers:
        assert_refused(answer, "log-probabilities", "max_tokens")


@pytest.mark.proof("faults")
@pytest.mark.parametrize(("prompts", "tokens"), [(47, 1000), (1, 32_000)])
def test_most_log_probabilities_that_are_served_fit_in_memory(worker: WorkerProcess, prompts: int, tokens: int) -> None:
    fields = {"prompt": [[1, 2, 3, 4] * (tokens // 4)] * prompts, "max_tokens": 1, "echo": True, "logprobs": 20}
    with bounded(worker):
        answer = post(worker, "/v1/completions", **fields, timeout=120)
    assert answer.status_code == 200, answer.text[:500]
    scored = sum(len(choice["logprobs"]["tokens"]) for choice in answer.json()["choices"])
    print(f"{21 * scored} log-probabilities served")
