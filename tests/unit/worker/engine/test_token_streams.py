"""Tests of token streams: which requests are in flight, and the bound of unread answers."""

from __future__ import annotations

import pytest

from specdecode_worker.core.errors import EngineGone
from specdecode_worker.core.messages import Tokens
from specdecode_worker.engine.client import Stream, StreamTable


def tokens(request_id: str, *, last: bool = False) -> Tokens:
    return Tokens(request_id=request_id, tokens=(1,), finish="length" if last else None)


class Table:
    """Table of two unread answers whose streams it records when they abort."""

    def __init__(self) -> None:
        self.table = StreamTable(max_unread=2)
        self.aborted: list[str] = []

    def submit(self, request_id: str) -> Stream:
        stream = Stream(request_id, self._close)
        self.table.add(stream)
        return stream

    def _close(self, stream: Stream, stopped: bool) -> None:
        if self.table.remove(stream.request_id):
            self.aborted.append(stream.request_id)


@pytest.fixture
def made() -> Table:
    return Table()


async def test_request_is_in_flight_until_its_last_tokens_arrive(made: Table) -> None:
    stream = made.submit("a")
    made.table.deliver(tokens("a"))
    assert (made.table.in_flight, made.table.unread) == (1, 0)
    made.table.deliver(tokens("a", last=True))
    assert (made.table.in_flight, made.table.unread) == (0, 1)
    assert [one.finish async for one in stream] == [None, "length"]
    stream.close()
    assert (made.table.unread, made.aborted) == (0, [])


async def test_closing_an_unfinished_stream_aborts_its_request(made: Table) -> None:
    with made.submit("a") as stream:
        made.table.deliver(tokens("a"))
    assert made.aborted == ["a"]
    stream.close()
    assert made.aborted == ["a"]
    made.table.deliver(tokens("a", last=True))
    assert made.table.unread == 0


async def test_oldest_unread_answer_is_cut_beyond_the_bound(made: Table) -> None:
    streams = {name: made.submit(name) for name in "abc"}
    for name in "abc":
        made.table.deliver(tokens(name))
        made.table.deliver(tokens(name, last=True))
    assert made.table.unread == 2
    with pytest.raises(EngineGone, match="did not read"):
        await anext(streams["a"])
    assert [one.finish async for one in streams["b"]] == [None, "length"]
    assert made.aborted == []


async def test_all_requests_in_flight_end_with_the_engine(made: Table) -> None:
    finished, running = made.submit("a"), made.submit("b")
    made.table.deliver(tokens("a", last=True))
    made.table.end_all("planted")
    assert [one.finish async for one in finished] == ["length"]
    with pytest.raises(EngineGone, match="planted"):
        await anext(running)
