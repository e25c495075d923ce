"""One attempt of a request: one internal stream of one worker, read frame by frame."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import aiohttp

from specdecode_router.errors import WorkerFailed
from specdecode_router.relay.context import RelayContext
from specdecode_router.relay.suspicion import WorkerSigns
from specdecode_router.telemetry.metrics import Stage
from specdecode_router.workers.worker import Endpoint
from specdecode_worker.contract.internal_stream import (
    Alive,
    End,
    Error,
    Frame,
    FrameReader,
    Moved,
    Open,
    OpenStream,
    Step,
    encode_document,
)


class KeyDiffers(WorkerFailed):
    """Error of an attempt to continue a request on a worker that would give it another text."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Result of an attempt whose worker closed the connection, sent no frame or broke the contract."""

    reason: str
    answered: bool
    """True if the worker had begun its answer. The request may then be the cause of the failure."""
    is_fault: bool = True
    """False if the worker is in order, but cannot give this request its text."""


Outcome = End | Error | Moved | Failed
"""Result of an attempt."""
Taker = Callable[["Attempt", Open | Step], Awaitable[None]]
"""Function that takes the frames of an attempt while it runs."""


class Attempt:
    """Internal stream of one worker for one request."""

    __slots__ = ("_clock", "_context", "_headers", "_take", "answered", "body", "delivered",
                 "endpoint", "is_paused", "is_suspected", "resumed", "signs", "started")  # fmt: skip

    def __init__(
        self,
        endpoint: Endpoint,
        request: OpenStream,
        context: RelayContext,
        take: Taker,
        headers: Mapping[str, str],
    ) -> None:
        self.endpoint = endpoint
        self.resumed = request.resume is not None
        self.answered = False
        """True once the worker has sent something."""
        self.delivered = False
        """True once a frame of this attempt was used."""
        self.is_paused = False
        """True while frames are not read, because the client of the request reads too slowly."""
        self.is_suspected = False
        self.body, self._headers = encode_document(request), headers
        """Request as it is sent; empty once the worker answers."""
        self._context, self._take, self._clock = context, take, context.clock
        self.started = context.clock()
        self.signs = WorkerSigns(last_frame=self.started)

    async def run(self) -> Outcome:
        """Send the request and read frames until the last one. Return how the attempt ended.

        Errors of the client of the request pass through.
        """
        try:
            client = self._context.client
            response = await client.open_stream(self.endpoint.admin_url, self.body, self._headers, self._observe_sent)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return Failed(_text(error), answered=False)
        self.body = b""
        try:
            return await self._read(response)
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    def _observe_sent(self) -> None:
        self._context.metrics.observe_added_latency(Stage.connect, self._clock() - self.started)

    async def _read(self, response: aiohttp.ClientResponse) -> Outcome:
        if response.status != 200:
            return Failed(f"it answered with status {response.status}", answered=False)
        reader, content, unread_seconds = FrameReader(), response.content, 0.0
        try:
            while True:
                try:
                    data = await content.readany()
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    return self._lost(_text(error), unread_seconds)
                if not data:
                    return self._lost("it closed the connection before the last frame", unread_seconds)
                self.signs.last_frame = began = self._clock()
                self.answered = True
                for frame in reader.push(data):
                    if (outcome := await self._use(frame)) is not None:
                        await _finish(response)
                        return outcome
                unread_seconds = self._clock() - began
        except KeyDiffers as error:
            return Failed(str(error), answered=False, is_fault=False)
        except (ValueError, WorkerFailed) as error:
            return Failed(str(error), self.answered)

    def _lost(self, reason: str, unread_seconds: float) -> Failed:
        """Return the result for a broken connection. The worker may close one that is not read for a slow client."""
        is_fault = unread_seconds < self._context.limits.write_timeout_seconds
        return Failed(reason, answered=self.answered and is_fault, is_fault=is_fault)

    async def _use(self, frame: Frame) -> Outcome | None:
        """Pass a frame on. Return it if it is the last one."""
        if isinstance(frame, Open | Step):
            await self._take(self, frame)
            return None
        if isinstance(frame, Alive):
            self.signs.observe_alive(frame.step, frame.longest_step_seconds, self._clock())
            return None
        return frame


async def _finish(response: aiohttp.ClientResponse) -> None:
    """Read the end of a response, if it is there already, so that its connection can be used again."""
    content = response.content
    if not content.at_eof() and content.is_eof():
        content.read_nowait()


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
