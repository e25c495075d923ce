"""Frames of internal streams over the fake engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from internal_client import Journal, answer_of

from specdecode_worker.contract.internal_stream import Error, OpenStream
from specdecode_worker.server.service import Service

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def opened(route: str = COMPLETIONS, *, request_id: str = "r-1", **body: Any) -> OpenStream:
    asked: dict[str, Any] = {"model": "small", "max_tokens": 24, "seed": 5, **body}
    asked.setdefault(*(("messages", [{"role": "user", "content": "hi"}]) if route == CHAT else ("prompt", "hello")))
    return OpenStream(route=route, body=json.dumps(asked).encode(), request_id=request_id)


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [True, False])
async def test_frames_carry_the_answer_of_the_public_port(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, route: str, stream: bool
) -> None:
    request = opened(route, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
    journal = await Journal(request).follow(admin)
    public = await client.post(route, content=request.body, headers={"X-Request-Id": "r-1"})
    answer, expected = answer_of(journal.body, stream=stream), answer_of(public.content, stream=stream)
    for one in (answer, expected):
        one.pop("created", None)
        one["heads"] = [(head[0], head[1]) for head in one.get("heads", ())]
    assert answer == expected
    assert [step.index for step in journal.steps] == list(range(0, 24, 3))
    assert journal.start is not None
    assert journal.start.stream == stream


async def test_refused_request_is_an_error_frame(admin: httpx.AsyncClient, service: Service) -> None:
    journal = await Journal(opened(temperature=9)).follow(admin)
    assert isinstance(journal.last, Error)
    assert (journal.last.status, journal.last.retryable, journal.start) == (400, False, None)
    assert json.loads(journal.last.body)["error"]["param"] == "temperature"
