"""Frames of internal streams over the fake engine: answers, errors and continuations."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest

from specdecode_worker.contract.internal_stream import (
    INTERNAL_STREAMS,
    Alive,
    ChoiceProgress,
    End,
    Error,
    OpenStream,
    Resume,
    Step,
)
from specdecode_worker.server import internal_stream
from specdecode_worker.server.service import Service
from support.internal_client import CHAT, COMPLETIONS, Journal, all_of, answer_of, frames, opened
from support.worker import fake_engine

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get", "put")]
CALLS = (
    'SAY:So:\n<tool_call>{"name": "get", "arguments": {"of": "gr\u00fc\u00df", "n": [{"a": "}"}]}}</tool_call>'
    '\n<tool_call>{"arguments": {}, "name": "put"}</tool_call>'
)


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [True, False])
async def test_frames_carry_the_answer_of_the_public_port(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, route: str, stream: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    request = opened(route, stream=stream, unheard_of=1, **options)
    journal = await Journal(request).follow(admin)
    public = await client.post(route, content=request.body, headers={"X-Request-Id": "r-1"})
    answer, expected = answer_of(journal.body, stream=stream), answer_of(public.content, stream=stream)
    for one in (answer, expected):
        one.pop("created", None)
        one["heads"] = [(head[0], head[1]) for head in one.get("heads", ())]
    assert answer == expected
    assert [step.index for step in journal.steps] == list(range(0, 24, 3))
    assert (journal.start.stream, bool(journal.start.opening)) == (stream, stream and route == CHAT)
    assert journal.start.headers == (("X-Specdecode-Ignored", "unheard_of"),)
    assert public.headers["X-Specdecode-Ignored"] == "unheard_of"
    assert (journal.end.completion_tokens, journal.steps[-1].counters.acceptance) == (24, (0, 0, 8))


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("stream", [True, False])
async def test_parallel_calls_continue_at_every_token(admin: httpx.AsyncClient, stream: bool, logprobs: bool) -> None:
    said = [{"role": "user", "content": CALLS}]
    request = opened(CHAT, messages=said, tools=TOOLS, max_tokens=150, stream=stream, logprobs=logprobs)
    whole = await Journal(request).follow(admin)
    expected = answer_of(whole.body, stream=stream)
    choice = expected["choices"][0]
    calls = choice["calls"].values() if stream else choice["message"]["tool_calls"]
    assert len(calls) == 2
    ids = [one["ids"][0] if stream else one["id"] for one in calls]
    assert len(set(ids)) == 2, "calls have ids of their own"
    start = whole.start
    assert start is not None
    tokens, scored = whole.ids(), [one for step in whole.steps for one in step.logprobs]
    places = asyncio.Semaphore(6)

    async def check(count: int) -> None:
        steps = sum(step.index + len(step.ids) <= count for step in whole.steps)
        known = ChoiceProgress(ids=tuple(tokens[:count]), logprobs=tuple(scored[:count]))
        sent = msgspec.structs.replace(request, resume=Resume(open=start, choices=(known,)))
        async with places:
            rest = [frame async for frame in frames(admin, sent)]
        end = rest[-1]
        assert isinstance(end, End), end
        assert [token for one in rest if isinstance(one, Step) for token in one.ids] == tokens[count:], count
        if not stream:
            assert answer_of(end.body, stream=False)["choices"] == expected["choices"], count
        elif sum(len(step.ids) for step in whole.steps[:steps]) == count:
            first = b"".join(step.events for step in whole.steps[:steps])
            second = b"".join(one.events for one in rest if isinstance(one, Step))
            assert answer_of(start.opening + first + second + end.body, stream=True) == expected, count

    await all_of(map(check, range(len(tokens) + 1)))


async def test_call_ids_follow_from_the_request_id(client: httpx.AsyncClient) -> None:
    body = opened(CHAT, messages=[{"role": "user", "content": CALLS}], tools=TOOLS, max_tokens=150, n=2).body

    async def ids(request_id: str) -> list[str]:
        answer = (await client.post(CHAT, content=body, headers={"X-Request-Id": request_id})).json()
        return [call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]]

    first, again, other = await ids("a"), await ids("a"), await ids("b")
    assert first == again
    assert len({*first, *other}) == 8


@pytest.mark.parametrize(
    ("request_", "status", "retryable"),
    [
        (opened(model="other"), 404, False),
        (opened("/v1/models"), 404, False),
        (opened(prompt=[fake_engine.REFUSED]), 500, False),
        (opened(prompt=[fake_engine.CRASH]), 500, True),
        (opened(n=9), 400, False),
        (opened(temperature=9), 400, False),
        (msgspec.structs.replace(opened(), timeout_seconds=-1.0), 504, False),
        (opened(prompt="x" * 600), 400, False),
    ],
)
async def test_errors_say_whether_another_worker_may_answer(
    admin: httpx.AsyncClient, request_: OpenStream, status: int, retryable: bool
) -> None:
    journal = await Journal(request_).follow(admin)
    assert isinstance(journal.last, Error), journal.last
    assert (journal.last.status, journal.last.retryable) == (status, retryable), journal.last.body


async def test_body_that_exceeds_a_frame_is_an_error_of_the_request(
    admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = opened(logprobs=1)
    most = len((await Journal(request).follow(admin)).end.body)
    for bound, last in ((most, End), (most - 1, Error)):
        monkeypatch.setattr(internal_stream, "MAX_BODY_BYTES", bound)
        journal = await Journal(request).follow(admin)
        assert isinstance(journal.last, last)
    assert (journal.last.status, journal.last.retryable) == (400, False)
    error = json.loads(journal.last.body)["error"]
    assert error["param"] == "logprobs"
    assert f"{most - 1} bytes" in error["message"]


async def test_undecodable_body_gets_400(admin: httpx.AsyncClient) -> None:
    answer = await admin.post(INTERNAL_STREAMS, content=b"no request")
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("change", ["prompts", "choices", "prompt", "sampling", "id", "behind the end", "logprobs"])
async def test_resume_of_another_request_is_refused(admin: httpx.AsyncClient, change: str) -> None:
    request = opened(logprobs=1)
    start = (await Journal(request).follow(admin)).start
    progress = ChoiceProgress(ids=(1, 2), logprobs=((-1.0, 1, (), ()),) * 2)
    replace, choices = msgspec.structs.replace, (progress,)
    match change:
        case "prompts":
            start = replace(start, prompts=())
        case "choices":
            choices = (progress, progress)
        case "prompt":
            start = replace(start, choices=(replace(start.choices[0], prompt=1),))
        case "sampling":
            start = replace(start, choices=(replace(start.choices[0], sampling=b"x"),))
        case "id":
            choices = (replace(progress, ids=(1, 10**6)),)
        case "behind the end":
            choices = (replace(progress, ids=(1,) * 25, logprobs=progress.logprobs[:1] * 25),)
        case "logprobs":
            choices = (replace(progress, logprobs=()),)
    sent = replace(request, resume=Resume(open=start, choices=choices))
    (last,) = [frame async for frame in frames(admin, sent) if not isinstance(frame, Alive)]
    assert isinstance(last, Error)
    assert (last.status, last.retryable) == (400, False), last.body


async def test_continued_request_is_counted_once(admin: httpx.AsyncClient, service: Service) -> None:
    whole = await Journal(opened()).follow(admin)
    before = await service.report()
    continued = await whole.cut(3).follow(admin, resume=True)
    after = await service.report()
    assert continued.end == whole.end
    assert after.traffic[0].arrivals == before.traffic[0].arrivals
    assert after.traffic[0].finished == before.traffic[0].finished + 1
    assert sum(service.counts.prompt_tokens.counts) == 2, "each worker that ends a request counts its size"
    assert service.counts.generation_tokens.sum == 2 * 24


async def test_continued_request_keeps_the_time_of_its_start(admin: httpx.AsyncClient) -> None:
    journal = await Journal(opened()).follow(admin)
    assert journal.start is not None
    journal.start = msgspec.structs.replace(journal.start, created=1234)
    continued = await journal.cut(2).follow(admin, resume=True)
    assert json.loads(continued.end.body)["created"] == 1234


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/small", None),
        ("GET", "/v1/models/other", None),
        ("GET", "/version", None),
        ("POST", "/tokenize", {"model": "small", "prompt": "hi", "return_token_strs": True}),
        ("POST", "/tokenize", {"model": "small"}),
        ("POST", "/detokenize", {"model": "small", "tokens": [1, 2, 3]}),
        ("GET", "/nothing", None),
        ("PUT", "/tokenize", None),
    ],
)
async def test_public_routes_give_the_same_answer_on_the_admin_port(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, method: str, path: str, body: Any
) -> None:
    public = await client.request(method, path, json=body)
    internal = await admin.request(method, f"/internal/v1/public{path}", json=body)
    assert (internal.status_code, internal.json()) == (public.status_code, public.json())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_generation_routes_are_not_among_them(admin: httpx.AsyncClient, path: str) -> None:
    assert (await admin.post(f"/internal/v1/public{path}", content=opened(path).body)).status_code == 404
