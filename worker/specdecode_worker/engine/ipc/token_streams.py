"""Token streams of the requests in flight, and of finished requests that are not read to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from specdecode_worker.engine.errors import EngineGone
from specdecode_worker.engine.ipc.messages import Tokens


class Stream:
    """Token stream of one request, in order. Closing a stream before its end aborts the request.

    Example:
        with client.submit(request) as stream:
            async for tokens in stream: ...
    """

    def __init__(self, request_id: str, on_close: Callable[[Stream], None]) -> None:
        self.request_id = request_id
        self._on_close = on_close
        self._queue: asyncio.Queue[Tokens | EngineGone] = asyncio.Queue()
        self._over = False

    def deliver(self, item: Tokens | EngineGone) -> None:
        """Append tokens, or the error that ends the stream."""
        self._queue.put_nowait(item)

    def cut(self, reason: str) -> None:
        """Drop all unread tokens and end the stream with EngineGone."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self.deliver(EngineGone(reason))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Tokens:
        """Return the next tokens. Raise EngineGone if the engine ends before the request does."""
        if self._over:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, EngineGone):
            self._over = True
            raise item
        self._over = item.finish is not None
        return item

    def close(self) -> None:
        """Abort the request if it is unfinished; a pending read raises EngineGone. May be called twice."""
        self._on_close(self)
        if not self._over:
            self.deliver(EngineGone("the stream was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StreamTable:
    """Open streams of one engine client, by request id.

    A request is in flight until its last tokens have arrived, whether or not the client has read them. Its stream then
    stays open until it is closed. At most ``max_unread`` such streams stay open; beyond it the oldest is cut, so that
    clients that do not read cannot fill the memory.
    """

    def __init__(self, max_unread: int) -> None:
        self._max_unread = max_unread
        self._in_flight: dict[str, Stream] = {}
        self._unread: dict[str, Stream] = {}

    @property
    def in_flight(self) -> int:
        """Number of requests that are submitted and not finished."""
        return len(self._in_flight)

    @property
    def unread(self) -> int:
        """Number of finished requests with an open stream."""
        return len(self._unread)

    def add(self, stream: Stream) -> None:
        """Add the stream of a new request."""
        assert stream.request_id not in self._in_flight, "request ids are unique"
        self._in_flight[stream.request_id] = stream

    def deliver(self, tokens: Tokens) -> None:
        """Append tokens to the stream of their request. Tokens of a closed stream are dropped."""
        stream = self._in_flight.get(tokens.request_id)
        if stream is None:
            return
        stream.deliver(tokens)
        if tokens.finish is not None:
            del self._in_flight[tokens.request_id]
            self._unread[tokens.request_id] = stream
            if len(self._unread) > self._max_unread:
                self._unread.pop(next(iter(self._unread))).cut("the client did not read its answer in time")

    def remove(self, request_id: str) -> bool:
        """Remove a closed stream. Return whether its request was still in flight."""
        self._unread.pop(request_id, None)
        return self._in_flight.pop(request_id, None) is not None

    def end_all(self, reason: str) -> None:
        """End the stream of every request in flight with EngineGone."""
        for stream in self._in_flight.values():
            stream.deliver(EngineGone(reason))
