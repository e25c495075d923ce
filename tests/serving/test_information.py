"""Informational routes of the public port, and tokenization without a completion."""

from __future__ import annotations

import httpx
import pytest
from fastapi.routing import APIRoute

from specdecode_worker.server.admission import ReloadedSecrets
from specdecode_worker.server.routes.public import public_app
from specdecode_worker.server.service import Service
from support.worker import fake_engine
from support.worker.services import client_of


async def test_information_about_the_model_and_the_program(client: httpx.AsyncClient) -> None:
    card = (await client.get("/v1/models")).json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("small", fake_engine.MAX_MODEL_LEN)
    assert (await client.get("/version")).json()["version"]
    assert (await client.get("/v1/models/small")).json() == card
    assert (await client.get("/v1/models/other")).status_code == 404


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
        assert answer.headers["X-Should-Retry"] == "false"
        assert remedy in error["message"]


async def test_every_answer_has_the_id_of_its_request(
    client: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"X-Request-Id": "id.1"}
    monkeypatch.setattr("specdecode_worker.server.routes.public.VERSION", object())
    answers = [
        (200, await client.get("/v1/models", headers=named)),
        (404, await client.get("/v1/nothing", headers=named)),
        (405, await client.get("/v1/completions", headers=named)),
        (400, await client.post("/v1/completions", content=b"{", headers=named)),
        (400, await client.post("/v1/completions", content=b"{}", headers={**named, "X-Request-Timeout": "soon"})),
        (500, await client.get("/version", headers=named)),
    ]
    assert [(answer.status_code, answer.headers.get_list("X-Request-Id")) for _, answer in answers] == [
        (status, ["id.1"]) for status, _ in answers
    ]
    made = (await client.get("/v1/models", headers={"X-Request-Id": "not valid"})).headers["X-Request-Id"]
    assert len(made) == 32
    keys = ReloadedSecrets("API keys", {"alice": "key"})
    async with client_of(public_app(service, keys)) as stranger:
        answer = await stranger.get("/v1/models", headers=named)
        assert (answer.status_code, answer.headers["X-Request-Id"]) == (401, "id.1")
