"""Ids of events, and streams that go on behind any of their events."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from specdecode_router.relay.event_ids import (
    EventPosition,
    StreamIdentity,
    parse_event_id,
    request_digest,
    start_digest,
)
from specdecode_router.relay.numbered_stream import MAX_NUMBERED_CHOICES, NumberedStream
from specdecode_worker.contract.internal_stream import ChoiceCounters, ChoiceStart, Open, Step
from support.stream_workers import Event, Recorder, events_of

IDENTITY = StreamIdentity(request_id="r-1", created=7, seed=2**63 - 1, request_digest=b"12345678")
Choice = list[list[bytes]]
"""Events of each token of one choice."""


def opened(choices: int, *, opening: bytes = b"", key: str = "key") -> Open:
    starts = tuple(ChoiceStart(prompt=0, sampling=b"s") for _ in range(choices))
    return Open(compatibility_key=key, prompts=((1, 2),), choices=starts, created=7, stream=True, opening=opening)


def event(text: str) -> bytes:
    return f"data: {text}\n\n".encode()


def steps(choices: list[Choice], delivered: tuple[int, ...] | None, chance: random.Random) -> Iterator[Step]:
    """Yield the steps of a worker: choices in turns of any length, and a step of its own for several events."""
    at = [0] * len(choices)
    while waiting := [index for index, tokens in enumerate(choices) if at[index] < len(tokens)]:
        choice = chance.choice(waiting)
        tokens, first = choices[choice], at[choice]
        have = delivered[choice] if delivered is not None else 0
        last = first + 1
        while last < len(tokens) and last != have and chance.random() < 0.5:
            if len(tokens[first]) > 1 or len(tokens[last]) > 1 or tokens[first]:
                break
            last += 1
        at[choice] = last
        events = b"" if last <= have else b"".join(b"".join(one) for one in tokens[first:last])
        yield Step(choice=choice, index=first, ids=tuple(range(first, last)), counters=ChoiceCounters(), events=events)


async def send(
    choices: list[Choice], last_id: str, chance: random.Random, *, opening: bytes, closing: bytes
) -> list[Event]:
    """Return the events behind one of them."""
    identity, after = parse_event_id(last_id) if last_id else (IDENTITY, None)
    recorder = Recorder()
    stream = NumberedStream(recorder, identity, after)
    start = opened(len(choices), opening=opening)
    assert stream.accepts(start)
    await stream.open(start)
    for step in steps(choices, after.delivered if after is not None else None, chance):
        if step.events:
            await stream.write(step)
    await stream.end(closing)
    return events_of(recorder.sent)


def by_choice(events: list[Event]) -> dict[bytes, list[bytes]]:
    """Return the events of each choice in order: those of several choices come in any order."""
    grouped: dict[bytes, list[bytes]] = {}
    for _, data in events:
        grouped.setdefault(data.split(b"-")[0], []).append(data)
    return grouped


@pytest.mark.parametrize("seed", range(40))
async def test_rest_behind_every_event_of_broken_rests(seed: int) -> None:
    """A client that loses its connection again and again gets every event once."""
    chance = random.Random(seed)
    count = chance.randint(1, 3)
    choices: list[Choice] = [
        [[event(f"{choice}-{token}-{part}") for part in range(chance.choice((0, 1, 1, 2, 3)))]
         for token in range(chance.randint(1, 8))]
        for choice in range(count)
    ]  # fmt: skip
    opening = b"".join(event(f"o-{number}") for number in range(chance.randint(0, count)))
    closing = event("u-1") * chance.randint(0, 1) + event("[DONE]")
    whole = await send(choices, "", chance, opening=opening, closing=closing)
    ids = [one for one, _ in whole]
    assert all(ids[:-1])
    assert len(set(ids)) == len(ids)
    for cut in range(1, len(whole)):
        received = whole[:cut]
        for _ in range(3):
            rest = await send(choices, received[-1][0], chance, opening=opening, closing=closing)
            received += rest[: chance.randint(1, len(rest))]
            if not received[-1][0]:
                break
        else:
            received += await send(choices, received[-1][0], chance, opening=opening, closing=closing)
        assert by_choice(received) == by_choice(whole)


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (EventPosition(opening=2), "o2"),
        (EventPosition(choices=((12, 0),)), "12"),
        (EventPosition(choices=((12, 3), (0, 0))), "12+3,0"),
        (EventPosition(choices=((12, 0), (4, 0)), closing=1), "12,4e1"),
    ],
)
def test_ids_are_read_as_they_are_written(position: EventPosition, text: str) -> None:
    assert position.encode() == text
    assert parse_event_id(f"{IDENTITY.encode()}.{text}") == (IDENTITY, position)


@pytest.mark.parametrize(
    "text",
    ["", ".", "12", "abc.12", f"{IDENTITY.encode()}", f"{IDENTITY.encode()}.x", f"{IDENTITY.encode()}.-1",
     f"{IDENTITY.encode()}.1,", f"{IDENTITY.encode()}!.1", f"{IDENTITY.encode()[:-8]}.1", "1" * 5000,
     f"{IDENTITY.encode()}." + ",".join("1" * 5000)],
)  # fmt: skip
def test_other_texts_are_no_ids(text: str) -> None:
    with pytest.raises(ValueError, match="no id of an event"):
        parse_event_id(text)


@pytest.mark.parametrize("fields", [{"request_id": "a\r\nb"}, {"request_id": ""}, {"created": -1}, {"version": 9}])
def test_ids_with_values_of_no_router_are_refused(fields: dict[str, object]) -> None:
    made = StreamIdentity(**{"request_id": "r", "created": 7, "seed": 1, "request_digest": b"", **fields})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it is"):
        parse_event_id(f"{made.encode()}.1")


def test_digest_of_a_request() -> None:
    digest = request_digest("/v1/completions", {"a": 1, "b": 2}, "alice")
    assert digest == request_digest("/v1/completions", {"b": 2, "a": 1}, "alice")
    assert digest != request_digest("/v1/completions", {"a": 1, "b": 3}, "alice")
    assert digest != request_digest("/v1/chat/completions", {"a": 1, "b": 2}, "alice")
    assert digest != request_digest("/v1/completions", {"a": 1, "b": 2}, "bob")


async def test_a_worker_with_another_start_is_not_accepted() -> None:
    first = opened(1)
    identity = StreamIdentity(request_id="r-1", created=7, seed=1, request_digest=b"", start_digest=start_digest(first))
    for position in (EventPosition(opening=1), EventPosition(choices=((1, 0),))):
        stream = NumberedStream(Recorder(), identity, position)
        assert stream.accepts(first)
        assert not stream.accepts(opened(1, key="other"))
        assert not stream.accepts(opened(2))
    assert not NumberedStream(Recorder(), identity, EventPosition(choices=((1, 0), (1, 0)))).accepts(first)


async def test_many_choices_have_no_ids() -> None:
    recorder = Recorder()
    stream = NumberedStream(recorder, IDENTITY)
    await stream.open(opened(MAX_NUMBERED_CHOICES + 1, opening=event("o-1")))
    await stream.end(event("[DONE]"))
    assert recorder.sent == event("o-1") + event("[DONE]")
