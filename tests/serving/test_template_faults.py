"""Chat templates over HTTP: what a template refuses is the client's fault, what its process does is the worker's."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from specdecode_worker.server import prompts as template_pool
from specdecode_worker.server.routes.public import public_app
from support import small_model
from support.processes import children
from support.worker.services import client_of, over_fake_engine

TEMPLATE = (
    "{% set said = messages[0].content %}"
    "{% if said == 'raise' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ said }}"
)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    small_model.write_tokenizer(tmp_path, template=TEMPLATE)
    async with over_fake_engine(tmp_path) as service, client_of(public_app(service)) as made:
        assert (await ask(made, "hi")).status_code == 200
        yield made


async def ask(client: httpx.AsyncClient, content: str) -> httpx.Response:
    body = {"model": "small", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    return await client.post("/v1/chat/completions", json=body)


def signal_process(number: signal.Signals) -> None:
    (pid,) = [pid for pid, words in children(os.getpid()).items() if "template_process" in words]
    os.kill(pid, number)


async def test_what_the_template_refuses_is_a_400(client: httpx.AsyncClient) -> None:
    answer = await ask(client, "raise")
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "messages"
    assert "roles must alternate" in answer.json()["error"]["message"]
    assert (await ask(client, "hi")).status_code == 200


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["died", "timed-out"])
async def test_a_lost_process_is_a_503_that_may_be_retried(
    client: httpx.AsyncClient, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_pool, "_WAIT_SECONDS", 0.2)
    assert (await ask(client, "hi")).status_code == 200  # a process takes the limit over after an answer
    signal_process(number)
    answer = await ask(client, "hi")
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == "template_process"
    assert answer.headers["Retry-After"] == "1"
    monkeypatch.setattr(template_pool, "_WAIT_SECONDS", 4.0)
    assert (await ask(client, "hi")).status_code == 200
