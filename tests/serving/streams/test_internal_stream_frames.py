"""Frames of internal streams over the fake engine: answers, errors, signs of life, moves and hang-ups."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import fake_engine
import httpx
import msgspec
import pytest
from internal_client import Journal, all_of, answer_of, frames
from worker_process import WorkerProcess, fake, worker_config

from specdecode_worker.contract import Report, Route
from specdecode_worker.contract.internal_stream import (
    INTERNAL_STREAMS,
    Alive,
    ChoiceProgress,
    End,
    Error,
    Moved,
    Open,
    OpenStream,
    Resume,
    Step,
    encode_request,
)
from specdecode_worker.engine.ipc.engine_client import EngineClient
from specdecode_worker.engine.ipc.heartbeat import Heartbeat, Phase
from specdecode_worker.server.lifecycle import Shutdown
from specdecode_worker.server.service import Service

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get", "put")]
CALLS = (
    'SAY:So:\n<tool_call>{"name": "get", "arguments": {"of": "gr\u00fc\u00df", "n": [{"a": "}"}]}}</tool_call>'
    '\n<tool_call>{"arguments": {}, "name": "put"}</tool_call>'
)
SILENT = [fake_engine.SILENT, 1, 2]


def opened(route: str = COMPLETIONS, *, request_id: str = "r-1", **body: Any) -> OpenStream:
    """Return a request; ``body`` are fields that differ from the usual ones."""
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
    assert (journal.start.stream, bool(journal.start.opening)) == (stream, stream and route == CHAT)
    assert (journal.end.completion_tokens, journal.steps[-1].counters.drafts) == (24, 8)


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


async def test_refused_request_is_an_error_frame(admin: httpx.AsyncClient) -> None:
    journal = await Journal(opened(temperature=9)).follow(admin)
    assert isinstance(journal.last, Error)
    assert (journal.last.status, journal.last.retryable, journal.start) == (400, False, None)
    assert json.loads(journal.last.body)["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("request_", "status", "retryable"),
    [
        (opened(model="other"), 404, False),
        (opened("/v1/models"), 404, False),
        (opened(prompt=[fake_engine.REFUSED]), 500, False),
        (opened(prompt=[fake_engine.CRASH]), 500, True),
        (opened(n=9), 400, False),
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


async def test_full_queue_is_retryable_and_says_when(admin: httpx.AsyncClient, service: Service) -> None:
    async with _running(admin, service, 8):
        refused = await Journal(opened()).follow(admin)
    assert isinstance(refused.last, Error)
    assert (refused.last.status, refused.last.retryable) == (429, True)
    assert dict(refused.last.headers)["Retry-After"] == "1"


async def test_undecodable_body_gets_400(admin: httpx.AsyncClient) -> None:
    answer = await admin.post(INTERNAL_STREAMS, content=b"no request")
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_streams_need_a_token(admin: httpx.AsyncClient) -> None:
    answer = await admin.post(INTERNAL_STREAMS, content=b"", headers={"Authorization": "Bearer wrong"})
    assert answer.status_code == 401


@pytest.mark.parametrize("change", ["prompts", "choices", "prompt", "sampling", "id", "behind the end", "logprobs"])
async def test_resume_of_another_request_is_refused(admin: httpx.AsyncClient, change: str) -> None:
    request = opened(logprobs=1)
    start = (await Journal(request).follow(admin)).start
    assert start is not None
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


@contextlib.asynccontextmanager
async def _running(admin: httpx.AsyncClient, service: Service, count: int = 1) -> AsyncIterator[list[Journal]]:
    """Yield the journals of streams that wait for a silent engine."""
    journals = [Journal(opened(prompt=SILENT, request_id=str(number))) for number in range(count)]
    tasks = [asyncio.create_task(journal.follow(admin)) for journal in journals]
    try:
        while service.engine.in_flight < count:
            await asyncio.sleep(0.01)
        yield journals
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_drain_moves_every_stream_at_once(admin: httpx.AsyncClient, service: Service, shutdown: Shutdown) -> None:
    async with _running(admin, service, 3) as journals:
        began = time.monotonic()
        assert await shutdown.begin() == 0
        assert time.monotonic() - began < 1
        await asyncio.sleep(0.05)
        assert [type(journal.last) for journal in journals] == [Moved] * 3
    assert not service.lifecycle.on_leave, "ended streams are not notified"
    late = await Journal(opened()).follow(admin)
    assert isinstance(late.last, Error)
    assert (late.last.status, late.last.retryable) == (503, True)


async def test_leaving_worker_takes_no_new_stream(admin: httpx.AsyncClient, service: Service) -> None:
    service.lifecycle.leave()
    late = await Journal(opened()).follow(admin)
    assert isinstance(late.last, Error)
    assert (late.last.status, late.last.retryable) == (503, True)


async def test_cancelled_stream_frees_its_place(admin: httpx.AsyncClient, service: Service) -> None:
    async with _running(admin, service):
        pass
    assert service.engine.in_flight == 0
    assert (await service.report()).running == 0


async def test_alive_frames_follow_the_heartbeat(
    admin: httpx.AsyncClient, service: Service, shutdown: Shutdown, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _running(admin, service) as (beating,):
        await asyncio.sleep(0.8)
        await shutdown.begin()
        await asyncio.sleep(0.05)
    assert 3 <= beating.alive <= 6


async def test_stopped_engine_gives_no_sign_of_life(
    admin: httpx.AsyncClient, service: Service, shutdown: Shutdown, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Heartbeat(Phase.STEP, 0.0, time.monotonic() - 0.6, 7, 1, 0, 0.1)
    monkeypatch.setattr(EngineClient, "heartbeat", property(lambda _: old))
    async with _running(admin, service) as (stopped,):
        await asyncio.sleep(0.6)
        await shutdown.begin()
        await asyncio.sleep(0.05)
    assert (stopped.alive, type(stopped.last)) == (0, Moved)


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


async def test_report_has_the_compatibility_key(admin: httpx.AsyncClient, service: Service) -> None:
    journal = await Journal(opened()).follow(admin)
    assert isinstance(journal.start, Open)
    report = Report.model_validate((await admin.get(Route.report)).json())
    assert report.compatibility_key == journal.start.compatibility_key != ""


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


@pytest.fixture
def worker(model_folder: Path, tmp_path: Path) -> Iterator[WorkerProcess]:
    with fake(worker_config(model_folder).model_dump_json(), tmp_path / "log") as started:
        started.wait_ready()
        yield started


def _admin_client(worker: WorkerProcess) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {worker.admin_token}"}
    return httpx.AsyncClient(base_url=worker.admin, headers=headers, timeout=10)


async def test_hang_up_cancels_the_request_at_once(worker: WorkerProcess) -> None:
    async with _admin_client(worker) as client:
        stream = frames(client, opened(prompt=SILENT))
        assert isinstance(await anext(stream), Alive), "frames arrive one by one"
        assert worker.call_admin(Route.report).json()["running"] == 1
        await stream.aclose()
    worker.wait_until(lambda: worker.call_admin(Route.report).json()["running"] == 0, 2)


def test_router_that_does_not_read_is_cut_off(model_folder: Path, tmp_path: Path) -> None:
    config = worker_config(model_folder)
    config = config.model_copy(update={"server": config.server.model_copy(update={"write_timeout_seconds": 1})})
    request = opened(prompt="SAY:" + "x" * 200, max_tokens=200, logprobs=20, n=8, stream=True)
    with fake(config.model_dump_json(), tmp_path / "log") as worker:
        worker.wait_ready()
        token, url = worker.admin_token, httpx.URL(worker.admin)
        body = encode_request(request)
        head = (
            f"POST {INTERNAL_STREAMS} HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((url.host, url.port)) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(head.encode() + body)
            worker.wait_until(lambda: "does not read its answer" in worker.log)
            worker.wait_until(lambda: worker.call_admin(Route.report).json()["running"] == 0, 2)
            worker.terminate()
            assert worker.exit_code(3) == 0, "its unread answers delay no drain"


async def test_killed_engine_is_a_retryable_error(worker: WorkerProcess) -> None:
    async with _admin_client(worker) as client:
        stream = frames(client, opened(prompt=[fake_engine.CRASH]))
        *_, last = [frame async for frame in stream]
    assert isinstance(last, Error)
    assert (last.status, last.retryable) == (500, True)


async def test_sigterm_moves_streams_and_loses_none(worker: WorkerProcess) -> None:
    async with _admin_client(worker) as client:
        stream = frames(client, opened(prompt=SILENT))
        await anext(stream)
        worker.terminate()
        *_, last = [frame async for frame in stream]
    assert isinstance(last, Moved)
    assert worker.exit_code(5) == 0
