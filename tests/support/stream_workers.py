"""Workers in this process that serve internal streams, and checks that another one continues what a client has read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from specdecode_router.frontend.stream_resumption import NumberedRequest
from specdecode_router.relay.event_ids import StreamIdentity, parse_event_id, request_digest
from specdecode_worker.contract import Plan, SyntheticKnobs, TreeShape, WorkerConfig
from specdecode_worker.contract.internal_stream import End, Error, Moved, Open, OpenStream, Step
from specdecode_worker.engine.client import EngineClient
from specdecode_worker.server.admission import Model, ReloadedSecrets, Scope
from specdecode_worker.server.listening import GracefulShutdown, Lifecycle
from specdecode_worker.server.routes.admin import admin_app
from specdecode_worker.server.service import Service
from specdecode_worker.server.tools import Tokenizer
from support.internal_client import Journal, all_of, answer_of, frames
from support.worker.services import client_of

TOKEN = "token-of-the-tests"


@dataclass
class StreamWorker:
    """A worker in this process with an engine process of its own."""

    service: Service
    client: httpx.AsyncClient

    async def close(self) -> None:
        self.service.close()
        await self.service.engine.close()


async def start_worker(config: WorkerConfig, folder: Path, shape: str) -> StreamWorker:
    """Start a worker whose drafts have a fixed shape. It must be closed."""
    plan = Plan(uid="uid-1", version=1, initial=TreeShape.parse(shape), max_depth=4, explore=0, guard=False)
    knobs = SyntheticKnobs(acceptance=(0.8, 0.7)) if shape != "none" else None
    engine = EngineClient(config, plan, knobs)
    service = Service(config, engine, Lifecycle(), plan)
    service.model_loaded(Model(Tokenizer.from_folder(folder), await engine.loaded))
    shutdown = GracefulShutdown(service.lifecycle, config.server, lambda: engine.in_flight, asyncio.Event())
    app = admin_app(service, shutdown, ReloadedSecrets("admin tokens", {Scope.router: TOKEN}))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return StreamWorker(service, client_of(app, "http://127.0.0.1:8001", headers=headers, timeout=60))


def same(answer: Any, expected: Any) -> bool:
    """Return whether two answers are equal. Log-probabilities are rounded by the shape of a batch."""
    if isinstance(expected, float):
        return isinstance(answer, float) and abs(answer - expected) < 1e-3
    if isinstance(expected, dict):
        return isinstance(answer, dict) and answer.keys() == expected.keys() and all(
            same(answer[key], value) for key, value in expected.items()
        )  # fmt: skip
    if isinstance(expected, list | tuple):
        return len(answer) == len(expected) and all(map(same, answer, expected))
    return bool(answer == expected)


async def check_cuts(
    request: OpenStream, first: StreamWorker, others: Sequence[StreamWorker], *, every: int = 1, at_once: int = 16
) -> int:
    """Run a request on the first worker, and continue it on each other one after steps 0, ``every``, 2 * ``every``, ...

    Tokens, answer and usage must be those of the first run. Return the number of continuations.
    """
    stream = bool(json.loads(request.body).get("stream"))
    whole = await Journal(request).follow(first.client)
    expected, usage = answer_of(whole.body, stream=stream), whole.end
    places = asyncio.Semaphore(at_once)

    async def check(steps: int, worker: StreamWorker) -> None:
        async with places:
            journal = await whole.cut(steps).follow(worker.client, resume=True)
        assert journal.start is not None
        where = f"{request.request_id}, stream={stream}, {steps} of {len(whole.steps)} steps"
        for choice in range(len(journal.start.choices)):
            assert journal.ids(choice) == whole.ids(choice), where
        assert (journal.end.prompt_tokens, journal.end.completion_tokens) == (
            usage.prompt_tokens, usage.completion_tokens,
        ), where  # fmt: skip
        answer, wanted = answer_of(journal.body, stream=stream), expected
        if any(not whole.cut(steps).length(choice) for choice in range(len(journal.start.choices))):
            answer, wanted = _without_cached(answer), _without_cached(wanted)
        assert same(answer, wanted), f"{where}:\n{answer}\n{wanted}"

    cuts = [(steps, worker) for steps in range(0, len(whole.steps) + 1, every) for worker in others]
    await all_of(check(*cut) for cut in cuts)
    return len(cuts)


def _without_cached(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without its cached tokens. Those of a choice without output depend on the worker."""
    usage = answer["usage"]
    usages = [usage] if isinstance(usage, dict) else usage
    bare = [{name: value for name, value in one.items() if name != "prompt_tokens_details"} for one in usages]
    return {**answer, "usage": bare}


Event = tuple[str, bytes]
"""Id of an event, empty without one, and its data with the empty line behind it."""


@dataclass
class Recorder:
    sent: bytes = b""

    def accepts(self, opened: Open) -> bool:
        return True

    async def open(self, opened: Open) -> None:
        self.sent += opened.opening

    async def write(self, step: Step) -> None:
        assert step.events or step.index == 0
        self.sent += step.events

    async def end(self, body: bytes) -> None:
        self.sent += body


def events_of(sent: bytes) -> list[Event]:
    events = []
    for text in sent.split(b"\n\n")[:-1]:
        lines = text.split(b"\n")
        data = [line for line in lines if line.startswith(b"data: ")]
        ids = [line.removeprefix(b"id: ").decode() for line in lines if line.startswith(b"id: ")]
        assert len(data) == 1
        assert len(lines) == 1 + len(ids)
        events.append((ids[0] if ids else "", data[0] + b"\n\n"))
    return events


async def read(worker: httpx.AsyncClient, request: OpenStream, last_id: str = "") -> list[Event]:
    """Return the events after ``last_id``, or all of them, as a router sends them."""
    digest = request_digest(request.route, msgspec.json.decode(request.body), "")
    identity = StreamIdentity(request_id=request.request_id, created=1_700_000_000, seed=5, request_digest=digest)
    numbered = NumberedRequest(*parse_event_id(last_id)) if last_id else NumberedRequest(identity, None)
    recorder = Recorder()
    client = numbered.client_stream(recorder)
    async for frame in frames(worker, numbered.open_stream(request)):
        match frame:
            case Open():
                assert client.accepts(frame)
                await client.open(frame)
            case Step():
                if frame.events:
                    await client.write(frame)
            case End():
                await client.end(frame.body)
            case Error() | Moved():
                raise AssertionError(frame)
    return events_of(recorder.sent)


async def check_rests(request: OpenStream, first: StreamWorker, other: StreamWorker) -> int:
    """Read a stream from the first worker, and the rest of it after every event from the other one.

    Both parts together must be the answer of the first worker. Return the number of rests.
    """
    whole = await read(first.client, request)
    ids = [event_id for event_id, _ in whole]
    assert all(ids[:-1])
    assert not ids[-1], "[DONE] has no id"
    assert len(set(ids)) == len(ids)
    expected = _answer(whole)

    async def check(count: int) -> None:
        rest = await read(other.client, request, ids[count - 1])
        answer = _answer(whole[:count] + rest)
        assert same(answer, expected), f"{request.request_id}, {ids[count - 1]}:\n{answer}\n{expected}"

    await all_of(check(count) for count in range(1, len(whole)))
    return len(whole) - 1


def _answer(events: list[Event]) -> dict[str, Any]:
    """Return the joined answer, without cached tokens: those depend on the worker."""
    answer = answer_of(b"".join(data for _, data in events), stream=True)
    answer["usage"] = [{name: one[name] for name in ("prompt_tokens", "completion_tokens")} for one in answer["usage"]]
    return answer
