"""The rest of a stream for a client with Last-Event-ID, also from another router."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from support.router_harness import RouterUnderTest, router_over
from support.stand_in_worker import Script, text_of
from support.stream_workers import Event, events_of

CHAT = "/v1/chat/completions"
IDS = {"X-Specdecode-Event-Ids": "true"}


def body(**fields: object) -> bytes:
    return json.dumps({"messages": [], "stream": True, **fields}).encode()


async def read(router: RouterUnderTest, sent: bytes, **headers: str) -> list[Event]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    status, _, content = await router.post(CHAT, data=sent, headers={**IDS, **named})
    assert status == 200, content
    return events_of(content)


def text(events: list[Event], choice: int = 0) -> str:
    chunks = [json.loads(data.removeprefix(b"data: ")) for _, data in events if b"[DONE]" not in data]
    parts = [part for chunk in chunks for part in chunk.get("choices", ()) if part["index"] == choice]
    return "".join(part["delta"]["content"] for part in parts)


async def test_rest_behind_every_event_from_another_router() -> None:
    sent = body(n=2)
    async with router_over(Script(tokens=6)) as first, router_over(Script(tokens=6, per_step=4)) as second:
        whole = await read(first, sent, X_Request_Id="id.1")
        assert [data for _, data in whole[:2]] == [b'data: {"opening": 0}\n\n', b'data: {"opening": 1}\n\n']
        for cut in range(1, len(whole)):
            status, headers, content = await second.post(CHAT, data=sent, headers={"Last-Event-ID": whole[cut - 1][0]})
            assert (status, headers["X-Request-Id"]) == (200, "id.1")
            events = whole[:cut] + events_of(content)
            assert [text(events, choice) for choice in (0, 1)] == [text_of(sent, 6, choice) for choice in (0, 1)]
            assert [data for _, data in events].count(b"data: [DONE]\n\n") == 1
            assert sum(b"opening" in data for _, data in events) == 2
        asked = second.workers[0].requests[-1]
        assert asked.delivered == (6, 6)
        assert asked.seed == first.workers[0].requests[0].seed is not None
        assert asked.created == first.workers[0].requests[0].created is not None


async def test_a_worker_that_dies_while_tokens_are_generated_again() -> None:
    sent = body()
    async with router_over(Script(tokens=12)) as router:
        whole = await read(router, sent)
        last_id = next(one for one, _ in whole if one.endswith(".9"))
        for close_at in (4, 10):
            async with router_over(Script(tokens=12, close_at=close_at), Script(tokens=12)) as other:
                rest = await read(other, sent, Last_Event_ID=last_id)
                assert text(whole[:10] + rest) == text_of(sent, 12)


async def test_a_worker_with_another_text_is_left_out() -> None:
    sent = body()
    async with router_over(Script()) as router:
        whole = await read(router, sent)
    scripts = [Script(key="other"), Script(key="other"), Script()]
    async with router_over(*scripts) as other:
        rest = await read(other, sent, Last_Event_ID=whole[4][0])
        assert text(whole[:5] + rest) == text_of(sent, 20)
        assert other.state.relay.workers.counts()["suspect"] == 0, "a worker with another model is in order"
    async with router_over(Script(key="other"), no_worker_seconds=0.3) as other:
        status, headers, content = await other.post(CHAT, data=sent, headers={"Last-Event-ID": whole[4][0]})
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "continue this request with the same text" in json.loads(content)["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "param", "words"),
    [
        ({"Last-Event-ID": "17"}, "Last-Event-ID", "whole id of the last event"),
        ({"X-Specdecode-Event-Ids": "yes"}, "X-Specdecode-Event-Ids", "true or false"),
    ],
)
async def test_bad_headers_are_refused(headers: dict[str, str], param: str, words: str) -> None:
    async with router_over(Script()) as router:
        status, _, content = await router.post(CHAT, data=body(), headers=headers)
        error = json.loads(content)["error"]
        assert (status, error["param"], error["code"]) == (400, param, "invalid_value")
        assert words in error["message"]
        assert not router.workers[0].requests


async def test_id_of_another_request_is_refused() -> None:
    async with router_over(Script()) as router:
        whole = await read(router, body())
        for sent in (body(temperature=1), body(stream=False), b"[]", b"no json"):
            status, _, content = await router.post(CHAT, data=sent, headers={"Last-Event-ID": whole[3][0]})
            error = json.loads(content)["error"]
            assert (status, error["param"]) == (400, "Last-Event-ID")
            assert "another request" in error["message"]
            assert "leave the header out to begin again" in error["message"]


async def test_no_ids_unless_the_client_asks_for_them() -> None:
    async with router_over(Script()) as router:
        for headers in ({}, {"X-Specdecode-Event-Ids": "false"}, {"Last-Event-ID": ""}):
            _, _, content = await router.post(CHAT, data=body(), headers=headers)
            assert b"id: " not in content
        assert all(one.seed is one.created is None for one in router.workers[0].requests)
        _, _, content = await router.post(CHAT, data=body(stream=False), headers=IDS)
        assert "texts" in json.loads(content)


async def test_openai_client_reads_a_stream_with_ids() -> None:
    fields: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with router_over(Script(opening=False)) as router:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{router.port}/v1", api_key="none", max_retries=0)
        stream = await client.chat.completions.create(**fields, extra_headers=IDS)
        answer = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert answer == text_of(router.workers[0].requests[0].body, 20)
        await client.close()
