"""Informational routes of the public port, and tokenization without a completion."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from specdecode_worker.server import chat_template as template_pool
from specdecode_worker.server.routes.public import public_app
from specdecode_worker.server.service import Service
from support import small_model
from support.worker import fake_engine
from support.worker.services import over_fake_engine


async def test_information_about_the_model_and_the_program(client: httpx.AsyncClient) -> None:
    card = (await client.get("/v1/models")).json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("small", fake_engine.MAX_MODEL_LEN)
    assert (await client.get("/version")).json()["version"]
    assert (await client.get("/v1/models/small")).json() == card


async def test_detokenize_inverts_tokenize(client: httpx.AsyncClient) -> None:
    body = {"prompt": "é<|end|>", "return_token_strs": True}
    tokenized = (await client.post("/tokenize", json=body)).json()
    assert (tokenized["count"], tokenized["max_model_len"]) == (3, fake_engine.MAX_MODEL_LEN)
    assert tokenized["token_strs"] == ["\u00c3", "\u00a9", "<|end|>"]
    back = await client.post("/detokenize", json={"model": "small", "tokens": tokenized["tokens"]})
    assert back.json() == {"prompt": "é<|end|>"}
    for wrong, status in (
        ({"tokens": [258]}, 400), ({"tokens": ["a"]}, 400), ({"tokens": [1], "model": "other"}, 404), ({}, 400),
    ):  # fmt: skip
        assert (await client.post("/detokenize", json=wrong)).status_code == status, wrong


async def test_openapi_document_lists_every_route(client: httpx.AsyncClient, service: Service) -> None:
    described = (await client.get("/openapi.json")).json()
    served = {(route.path.replace(":path", ""), m.lower()) for route in public_app(service).routes
              if isinstance(route, APIRoute) for m in route.methods}  # fmt: skip
    named = {(path, method) for path, methods in described["paths"].items() for method in methods}
    assert named == served - {("/openapi.json", "get")}
    assert described["components"]["schemas"]["DetokenizeRequest"]["properties"]["tokens"]["items"]["maximum"] == 257


async def test_unknown_paths_and_methods_get_an_error_object(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/nothing")).json()["error"]["message"] == "GET /v1/nothing: Not Found"
    assert (await client.get("/v1/completions")).status_code == 405


@pytest.mark.parametrize(
    ("path", "remedy"), [("/v1/responses", "v1/chat/completions"), ("/v1/embeddings", "embedding model")]
)
async def test_routes_that_are_not_built_say_why(
    client: httpx.AsyncClient, admin: httpx.AsyncClient, path: str, remedy: str
) -> None:
    for asked, prefix in ((client, ""), (admin, "/internal/v1/public")):
        answer = await asked.post(prefix + path, json={"model": "small", "input": "hi"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (501, "not_implemented")
        assert remedy in error["message"]


async def test_models(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == "small"
    assert (await client.get("/v1/models/small")).json()["max_model_len"] == fake_engine.MAX_MODEL_LEN
    assert (await client.get("/v1/models/other")).status_code == 404


# Chat templates over HTTP: what a template refuses is the client's fault, what its process does is the worker's.


TEMPLATE = (
    "{% set said = messages[0].content %}"
    "{% if said == 'raise' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if said == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{{ said }}"
)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    small_model.write_tokenizer(tmp_path, template=TEMPLATE)
    async with over_fake_engine(tmp_path) as service:
        transport = httpx.ASGITransport(public_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as made:
            assert (await ask(made, "hi")).status_code == 200
            yield made


async def ask(client: httpx.AsyncClient, content: str) -> httpx.Response:
    body = {"model": "small", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    return await client.post("/v1/chat/completions", json=body)


def signal_process(number: signal.Signals) -> None:
    pids = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    children = [int(pid) for each in pids for pid in each.read_text().split()]
    (pid,) = [pid for pid in children if b"template_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(pid, number)


@pytest.mark.parametrize(("content", "reason"), [("raise", "roles must alternate"), ("loop", "0.5 s of processor")])
async def test_what_the_template_refuses_is_a_400(client: httpx.AsyncClient, content: str, reason: str) -> None:
    answer = await ask(client, content)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "messages"
    assert reason in answer.json()["error"]["message"]
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
