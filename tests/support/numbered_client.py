"""Client of a stream whose events have ids, over workers in this process: it reads the rest after any of its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from specdecode_router.frontend.stream_resumption import NumberedRequest
from specdecode_router.relay.event_ids import StreamIdentity, parse_event_id, request_digest
from specdecode_worker.contract.internal_stream import End, Error, Moved, Open, OpenStream, Step
from support.internal_client import all_of, answer_of, frames
from support.stream_workers import StreamWorker, same

Event = tuple[str, bytes]
"""Id of an event, empty without one, and its data with the empty line behind it."""


@dataclass
class Recorder:
    """Stream of a client that records what is sent."""

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
    """Return the events of a stream."""
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
