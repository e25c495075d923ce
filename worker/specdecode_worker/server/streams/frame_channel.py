"""Channel of frames from the task of a request to its connection, with signs of life and a notice of moves."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from specdecode_worker.contract.internal_stream import (
    ALIVE_SECONDS,
    Alive,
    End,
    Error,
    Frame,
    Moved,
    encode_frame,
)

_MAX_QUEUED_FRAMES = 16
"""Frames that wait for the router outside of the token streams, which bound the unread output."""


class FrameChannel:
    """Bounded queue of frames for one connection. ``alive`` returns the sign of life that is due, or None."""

    def __init__(self, alive: Callable[[], Alive | None]) -> None:
        self._alive = alive
        self._frames: deque[Frame] = deque()
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._alive_due = False
        self.moved = False
        """True if the worker has asked for a continuation on another worker."""

    async def put(self, frame: Frame) -> None:
        """Append a frame, as soon as there is room for it."""
        while len(self._frames) >= _MAX_QUEUED_FRAMES:
            self._has_room.clear()
            await self._has_room.wait()
        self._frames.append(frame)
        self._has_news.set()

    def move(self) -> None:
        """End the stream with ``Moved`` after the frames that are queued now."""
        self.moved = True
        self._has_news.set()

    async def encoded(self) -> AsyncIterator[bytes]:
        """Yield the encoded frames as they arrive, up to the last one."""
        timer = _Timer(self._tick)
        try:
            while True:
                await self._has_news.wait()
                self._has_news.clear()
                frames = self._take()
                if frames:
                    yield b"".join(map(encode_frame, frames))
                if frames and isinstance(frames[-1], Moved | Error | End):
                    return
        finally:
            timer.cancel()

    def _take(self) -> list[Frame]:
        """Remove and return the frames to send now. A stream that has its last frame does not move."""
        frames: list[Frame] = []
        if self._alive_due and (alive := self._alive()) is not None:
            frames.append(alive)
        self._alive_due = False
        frames += self._frames
        self._frames.clear()
        self._has_room.set()
        if self.moved and not (frames and isinstance(frames[-1], Error | End)):
            frames.append(Moved())
        return frames

    def _tick(self) -> None:
        self._alive_due = True
        self._has_news.set()


class _Timer:
    """Repeated call of a function every ALIVE_SECONDS, first at once."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._next_seconds = self._loop.time()
        self._run()

    def cancel(self) -> None:
        """Stop the calls."""
        self._handle.cancel()

    def _run(self) -> None:
        self._call()
        self._next_seconds = max(self._next_seconds + ALIVE_SECONDS, self._loop.time())
        self._handle = self._loop.call_at(self._next_seconds, self._run)
