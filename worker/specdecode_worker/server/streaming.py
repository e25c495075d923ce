"""Answers as they are made: pieces of all choices, merged into server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from specdecode_worker.server.errors import ApiError
from specdecode_worker.server.generation import Generation
from specdecode_worker.server.requests.common import StreamOptions
from specdecode_worker.server.responses import DONE, Format, Json, Piece, event, usage

_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """Server-sent events that free the engine's slots however they end, even before the first event."""

    def __init__(
        self, generations: Sequence[Generation], form: Format, options: StreamOptions, headers: Mapping[str, str]
    ) -> None:
        events = _Events(generations, form, options)
        super().__init__(events.all(), media_type="text/event-stream", headers={**_SSE_HEADERS, **headers})
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            close(self._generations)


class _Events:
    """The frames of one stream."""

    def __init__(self, generations: Sequence[Generation], form: Format, options: StreamOptions) -> None:
        self._generations = generations
        self._form = form
        self._options = options

    async def all(self) -> AsyncIterator[bytes]:
        for index in range(len(self._generations)):
            if (opening := self._form.opening(index)) is not None:
                yield self._frame(opening)
        try:
            async for index, piece in _merged(self._generations):
                for chunk in self._form.chunks(index, piece):
                    yield self._frame(chunk)
        except ApiError as error:
            yield event(error.body())
            return
        if self._options.include_usage:
            yield event(self._form.closing([generation.statistics for generation in self._generations]))
        yield DONE

    def _frame(self, chunk: Json) -> bytes:
        if self._options.continuous_usage_stats:
            return event(chunk | {"usage": usage(generation.statistics for generation in self._generations)})
        # With include_usage every chunk has the field, null in all but the last: so OpenAI's reference says.
        return event(chunk | ({"usage": None} if self._options.include_usage else {}))


_Read = tuple[int, Piece] | Exception | None
"""A piece, what ended a generation early, or its end."""


async def _merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Piece]]:
    """Pieces of all generations as they come. Raises what the first failing one raises."""
    if len(generations) == 1:
        async for piece in generations[0].pieces():
            yield 0, piece
        return
    queue: asyncio.Queue[_Read] = asyncio.Queue()
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
    try:
        async for piece in generation.pieces():
            queue.put_nowait((index, piece))
    except Exception as error:
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)


def close(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.close()
