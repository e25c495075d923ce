"""A real router before real workers: streams go on with the same text when a worker dies or hangs in the middle.

Three workers are started once. Each test takes one away, or stops it for a while.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from specdecode_worker.contract import Env, SyntheticKnobs
from support import small_model
from support.internal_client import answer_of
from support.stream_workers import Event, events_of
from support.worker_process import WorkerProcess, real, running_router

TOKEN = "token-of-the-tests"
KNOBS = SyntheticKnobs.model_validate({"step_time": [{"seconds": 0.01}]}).model_dump_json()
"""Padding of steps, so that a stream lasts longer than a test needs to end its worker."""
CHAT: dict[str, Any] = {
    "model": "small",
    "messages": [{"role": "user", "content": "tell me"}],
    "max_tokens": 120,
    "temperature": 0.9,
    "seed": 11,
    "extra_body": {"ignore_eos": True},
}


@dataclass
class Site:
    """Router and workers."""

    workers: list[WorkerProcess]
    url: str
    folder: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def metric(self, name: str) -> float:
        """Return a metric of the router, summed over its labels."""
        text = httpx.get(f"{self.url}/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    def serving(self) -> WorkerProcess:
        """Return the worker that runs the only request."""
        for worker in self.workers * 20:
            # A worker without its engine ends a second later.
            with contextlib.suppress(httpx.TransportError):
                if worker.process.poll() is None and worker.report().running:
                    return worker
        raise AssertionError("no worker runs a request")


@pytest.fixture(scope="module")
def site(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, flags = tmp_path_factory.mktemp("site"), small_model.flags(*folders)
    environment = {Env.admin_token: TOKEN, Env.synthetic: KNOBS}
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(real(flags, folder / f"log-{number}", environment)) for number in range(3)]
        for worker in workers:
            worker.wait_ready()
        with running_router([worker.admin for worker in workers], folder / "log-router", TOKEN) as router:
            yield Site(workers, router.public, folder)


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.fixture(scope="module")
def unbroken(site: Site) -> str:
    """Return the text of the unbroken run, straight from a worker."""
    client = openai.OpenAI(base_url=f"{site.workers[0].public}/v1", api_key="none", max_retries=0)
    return client.chat.completions.create(**CHAT).choices[0].message.content or ""


def broken_run(site: Site, break_it: Any) -> tuple[str, WorkerProcess, float]:
    """Stream the request; call ``break_it`` with its worker after ten chunks. Return text, worker and longest gap."""
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    stream = site.client.chat.completions.create(**CHAT, **options)
    chunks, gap, last, victim = [], 0.0, time.monotonic(), None
    for chunk in stream:
        chunks.append(chunk)
        now = time.monotonic()
        gap, last = max(gap, now - last), now
        if len(chunks) == 10:
            victim = site.serving()
            break_it(victim)
            last = time.monotonic()
    assert victim is not None
    assert chunks[-1].usage.completion_tokens == CHAT["max_tokens"]
    assert chunks[-2].choices[0].finish_reason == "length"
    return text_of(chunks), victim, gap


def test_router_answers_as_a_worker(site: Site, unbroken: str) -> None:
    whole = site.client.chat.completions.create(**CHAT)
    assert whole.choices[0].message.content == unbroken
    assert text_of(list(site.client.chat.completions.create(**CHAT, stream=True))) == unbroken
    direct = openai.OpenAI(base_url=f"{site.workers[1].public}/v1", api_key="none", max_retries=0)
    assert site.client.models.list().data[0].id == direct.models.list().data[0].id == "small"
    errors = []
    for client in (site.client, direct):
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(**{**CHAT, "model": "other"})
        errors.append(missing.value.body)
    assert errors[0] == errors[1]
    tokens = [httpx.post(f"{url}/tokenize", json={"model": "small", "prompt": "abc"}).content
              for url in (site.url, site.workers[1].public)]  # fmt: skip
    assert tokens[0] == tokens[1]


def test_rest_behind_every_event_from_another_router(site: Site) -> None:
    """The client names no seed: the ids carry it to the other router."""
    fields = {**CHAT, **CHAT["extra_body"], "max_tokens": 16, "stream": True, "n": 2, "seed": None}
    del fields["extra_body"]

    def read(url: str, headers: dict[str, str]) -> list[Event]:
        answer = httpx.post(f"{url}/v1/chat/completions", json=fields, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return events_of(answer.content)

    with running_router([worker.admin for worker in site.workers], site.folder / "log-second", TOKEN) as second:
        whole = read(site.url, {"X-Specdecode-Event-Ids": "true"})
        expected = answer_of(b"".join(data for _, data in whole), stream=True)
        assert len(whole) > 20
        for count in range(1, len(whole)):
            rest = read(second.public, {"Last-Event-ID": whole[count - 1][0]})
            assert answer_of(b"".join(data for _, data in whole[:count] + rest), stream=True) == expected


def test_worker_refuses_to_send_a_rest(site: Site) -> None:
    answer = httpx.post(f"{site.workers[0].public}/v1/chat/completions", json={}, headers={"Last-Event-ID": "1"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "Last-Event-ID", "unsupported_header")


def test_false_suspicion_changes_nothing(site: Site) -> None:
    """Steps take longer than the silence that this router allows, so it suspects workers that are in order."""
    fields = {**CHAT, "max_tokens": 16}
    expected = site.client.chat.completions.create(**fields).choices[0].message.content
    flags = ("--min-silence-seconds=0.005", "--max-silence-seconds=0.005")
    admin_urls = [worker.admin for worker in site.workers]
    with running_router(admin_urls, site.folder / "log-impatient", TOKEN, *flags) as router:
        other = Site(site.workers, router.public, site.folder)
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(other.client.chat.completions.create(**fields, **options))
        assert other.metric("specdecode_router_hedges_total") >= 1
    assert text_of(chunks) == expected
    assert chunks[-1].usage.completion_tokens == fields["max_tokens"]


def test_stopped_engine(site: Site, unbroken: str) -> None:
    text, victim, gap = broken_run(site, lambda worker: os.kill(worker.engine_pid, signal.SIGSTOP))
    os.kill(victim.engine_pid, signal.SIGCONT)
    assert text == unbroken
    assert gap < 3.5, "the bound of the silence and a second, and the second worker's prompt"
    assert site.metric("specdecode_router_hedges_total") >= 1
    victim.wait_until(lambda: not victim.report().running)


def test_killed_engine(site: Site, unbroken: str) -> None:
    text, _, _ = broken_run(site, lambda worker: os.kill(worker.engine_pid, signal.SIGKILL))
    assert text == unbroken


def test_killed_server(site: Site, unbroken: str) -> None:
    text, _, _ = broken_run(site, lambda worker: worker.process.kill())
    assert text == unbroken
    assert site.metric("specdecode_router_resumes_total{") >= 3
    assert site.client.chat.completions.create(**CHAT).choices[0].message.content == unbroken, "the last worker serves"
