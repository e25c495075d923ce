"""Streaming responses: merges the pieces of all choices into server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from specdecode_worker.server.errors import ApiError
from specdecode_worker.server.generation import Generation
from specdecode_worker.server.requests.common import StreamOptions
from specdecode_worker.server.responses import DONE, ChoicePiece, Json, ResponseWriter, event, usage

# Scored tokens of one piece, or pieces, beyond which they are written in a thread: about ten milliseconds.
_MANY_SCORED_TOKENS = 512
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """Response of server-sent events. It frees the engine slots however it ends, even before the first event."""

    def __init__(
        self,
        generations: Sequence[Generation],
        writer: ResponseWriter,
        options: StreamOptions,
        headers: Mapping[str, str],
    ) -> None:
        events = _all_events(EventEncoder(generations, writer, options))
        super().__init__(events, media_type="text/event-stream", headers={**_SSE_HEADERS, **headers})
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, then close all generations."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            close(self._generations)


async def _all_events(encoder: EventEncoder) -> AsyncIterator[bytes]:
    """Yield the encoded events. An engine error becomes the last event of the stream."""
    for one in encoder.opening():
        yield one
    try:
        async for index, piece in _merged(encoder.generations):
            for one in await encoder.encode(index, piece):
                yield one
    except ApiError as error:
        yield event(error.body())
        return
    for one in encoder.closing():
        yield one


class EventEncoder:
    """Encoder of the server-sent events of one response."""

    def __init__(self, generations: Sequence[Generation], writer: ResponseWriter, options: StreamOptions) -> None:
        self.generations = generations
        self._writer = writer
        self._options = options

    def opening(self) -> list[bytes]:
        """Return the events before any text."""
        chunks = (self._writer.opening(index) for index in range(len(self.generations)))
        return [self._encoded(chunk) for chunk in chunks if chunk is not None]

    async def encode(self, index: int, piece: ChoicePiece) -> list[bytes]:
        """Return the events for a piece of a choice."""
        # The log-probabilities of an echoed prompt can take a second to write.
        if len(piece.scored) > _MANY_SCORED_TOKENS:
            return await asyncio.to_thread(self._encode, index, piece)
        return self._encode(index, piece)

    async def skip(self, index: int, pieces: Sequence[ChoicePiece]) -> None:
        """Process pieces of a choice whose events another worker has sent."""
        if len(pieces) > _MANY_SCORED_TOKENS:
            await asyncio.to_thread(self._skip, index, pieces)
        else:
            self._skip(index, pieces)

    def closing(self) -> list[bytes]:
        """Return the events after the last text."""
        if not self._options.include_usage:
            return [DONE]
        return [event(self._writer.closing([generation.statistics for generation in self.generations])), DONE]

    def _skip(self, index: int, pieces: Sequence[ChoicePiece]) -> None:
        for piece in pieces:
            if piece.is_shown:
                self._writer.chunks(index, piece)

    def _encode(self, index: int, piece: ChoicePiece) -> list[bytes]:
        return [self._encoded(chunk) for chunk in self._writer.chunks(index, piece)]

    def _encoded(self, chunk: Json) -> bytes:
        if self._options.continuous_usage_stats:
            return event(chunk | {"usage": usage(generation.statistics for generation in self.generations)})
        # OpenAI's reference: with include_usage every chunk has the field, and it is null in all but the last chunk.
        return event(chunk | ({"usage": None} if self._options.include_usage else {}))


_MAX_QUEUED_PIECES = 16
"""Pieces that wait for the client outside of their token streams, which bound the unread output."""
_Read = tuple[int, ChoicePiece] | Exception | None
"""Queue item: a piece with the index of its choice, the error that ended a generation, or None at its end."""


async def _merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, ChoicePiece]]:
    """Yield (choice index, piece) of all generations as they arrive. Raises the error of the first that fails."""
    if len(generations) == 1:
        async for piece in generations[0].pieces():
            yield 0, piece
        return
    queue: asyncio.Queue[_Read] = asyncio.Queue(_MAX_QUEUED_PIECES)
    readers = [asyncio.create_task(_read(index, one, queue)) for index, one in enumerate(generations)]
    try:
        reading = len(readers)
        while reading:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                reading -= 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*readers, return_exceptions=True)


async def _read(index: int, generation: Generation, queue: asyncio.Queue[_Read]) -> None:
    """Put every piece of one generation on the queue, then its error or None."""
    try:
        async for piece in generation.pieces():
            await queue.put((index, piece))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


def close(generations: Sequence[Generation]) -> None:
    """Close all generations, which frees their slots in the engine."""
    for generation in generations:
        generation.close()
