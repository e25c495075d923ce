"""Client stream whose events have ids, from its beginning or from the event after the last one that the client has."""

from __future__ import annotations

import msgspec

from specdecode_router.relay.client_stream import ClientStream
from specdecode_router.relay.event_ids import EventPosition, StreamIdentity, start_digest
from specdecode_worker.contract.internal_stream import Open, Step

MAX_NUMBERED_CHOICES = 128
"""Choices up to which events have ids: every id has a number for each of them."""
_END_OF_EVENT = b"\n\n"


class NumberedStream:
    """Wrapper of a client's stream that adds ids, and leaves out the events that the client has."""

    def __init__(self, client: ClientStream, identity: StreamIdentity, after: EventPosition | None = None) -> None:
        """Prepare the stream.

        Args:
            client: Stream of the client.
            identity: Identity of the stream; with ``after``, that of its first connection.
            after: Position behind the last event that the client has; None for a new stream.
        """
        self._client, self._identity, self._after = client, identity, after
        self._prefix = ""
        self._lengths: list[int] = []
        """Tokens of each choice up to the last step whose events are all sent."""
        self._sent: list[int] = []
        """Events of the next step of each choice that the client has already."""

    def accepts(self, opened: Open) -> bool:
        """Return whether a worker understood the request as the worker of the first connection did."""
        if self._after is None:
            return self._client.accepts(opened)
        delivered = self._after.delivered
        fits = delivered is None or len(delivered) == len(opened.choices)
        return fits and start_digest(opened) == self._identity.start_digest and self._client.accepts(opened)

    async def open(self, opened: Open) -> None:
        """Begin the response with the opening events that the client does not have, which go with the first step."""
        choices, after = len(opened.choices), self._after
        self._lengths, self._sent = [0] * choices, [0] * choices
        if choices <= MAX_NUMBERED_CHOICES:
            identity = msgspec.structs.replace(self._identity, start_digest=start_digest(opened))
            self._prefix = f"id: {identity.encode()}."
        received = 0 if after is None else after.opening
        if after is not None and after.opening is None:
            self._lengths = [tokens for tokens, _ in after.choices]
            self._sent = [events for _, events in after.choices]
        events = _split(opened.opening)
        numbered = [
            self._numbered(event, EventPosition(opening=number))
            for number, event in enumerate(events, start=1)
            if received is not None and number > received
        ]
        await self._client.open(msgspec.structs.replace(opened, opening=b"".join(numbered)))

    async def write(self, step: Step) -> None:
        """Send the events of a step that the client does not have."""
        choice, received = step.choice, self._sent[step.choice]
        numbered: list[bytes] = []
        events = _split(step.events)
        for number, event in enumerate(events, start=1):
            if number == len(events):
                self._lengths[choice], self._sent[choice] = step.index + len(step.ids), 0
            else:
                self._lengths[choice], self._sent[choice] = step.index, number
            if number > received:
                numbered.append(self._numbered(event, self._position()))
        if numbered or step.index == 0:
            await self._client.write(msgspec.structs.replace(step, events=b"".join(numbered)))

    async def drain(self) -> None:
        """Wait while the client has too much to read."""
        await self._client.drain()

    async def end(self, body: bytes) -> None:
        """Send the last events that the client does not have. ``[DONE]`` has no id, so it is sent in any case."""
        received = 0 if self._after is None else self._after.closing
        events = _split(body)
        numbered = [
            self._numbered(event, self._position(number)) if number < len(events) else event + _END_OF_EVENT
            for number, event in enumerate(events, start=1)
            if number > received
        ]
        await self._client.end(b"".join(numbered))

    def _position(self, closing: int = 0) -> EventPosition:
        return EventPosition(choices=tuple(zip(self._lengths, self._sent, strict=True)), closing=closing)

    def _numbered(self, event: bytes, position: EventPosition) -> bytes:
        if not self._prefix:
            return event + _END_OF_EVENT
        return f"{self._prefix}{position.encode()}\n".encode() + event + _END_OF_EVENT


def _split(events: bytes) -> list[bytes]:
    """Return the events of some bytes, without the empty line that ends each of them."""
    return events.removesuffix(_END_OF_EVENT).split(_END_OF_EVENT) if events else []
