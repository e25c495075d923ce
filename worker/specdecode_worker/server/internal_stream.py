"""Internal streams: frames for a router, which another worker can continue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from specdecode_worker.contract import internal_stream as contract
from specdecode_worker.contract.internal_stream import (
    ALIVE_SECONDS,
    MAX_BODY_BYTES,
    Alive,
    End,
    Error,
    Frame,
    Moved,
    encode_frame,
)
from specdecode_worker.server.admission import RequestTerms
from specdecode_worker.server.errors import (
    ApiError,
    BadRequest,
    DeadlineExceeded,
    EngineFailed,
    Unavailable,
    invalid_value,
)
from specdecode_worker.server.generation import Output, contract_logprobs
from specdecode_worker.server.responses import ChoicePiece, usage
from specdecode_worker.server.service import Call, Service, StartedRequest, start

log = logging.getLogger(__name__)

# Channel of frames from the task of a request to its connection, with signs of life and a notice of moves.

_MAX_QUEUED_FRAMES = 16
"""Frames that wait for the router outside of the token streams, which bound the unread output."""


class FrameChannel:
    """Bounded queue of frames for one connection.

    ``alive`` returns the sign of life that is due, or None. ``block_port`` is that of `Moved`.
    """

    def __init__(self, alive: Callable[[], Alive | None], block_port: int = 0) -> None:
        self._alive, self._block_port = alive, block_port
        self._frames: asyncio.Queue[Frame] = asyncio.Queue(_MAX_QUEUED_FRAMES)
        self._has_news = asyncio.Event()
        self._has_news.set()  # the first sign of life is due at once
        self._alive_due = True
        self.moved = False
        """True if the worker has asked for a continuation on another worker."""

    async def put(self, frame: Frame) -> None:
        """Append a frame, as soon as there is room for it."""
        await self._frames.put(frame)
        self._has_news.set()

    def move(self) -> None:
        """End the stream with ``Moved`` after the frames that are queued now."""
        self.moved = True
        self._has_news.set()

    async def encoded(self) -> AsyncIterator[bytes]:
        """Yield the encoded frames as they arrive, up to the last one."""
        beating = asyncio.create_task(self._beat())
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
            beating.cancel()

    def _take(self) -> list[Frame]:
        """Remove and return the frames to send now. A stream that has its last frame does not move."""
        frames: list[Frame] = []
        if self._alive_due and (alive := self._alive()) is not None:
            frames.append(alive)
        self._alive_due = False
        while not self._frames.empty():
            frames.append(self._frames.get_nowait())
        if self.moved and not (frames and isinstance(frames[-1], Error | End)):
            frames.append(Moved(self._block_port))
        return frames

    async def _beat(self) -> None:
        """Make a sign of life due every ALIVE_SECONDS."""
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            self._alive_due = True
            self._has_news.set()


# Internal stream of one request: its generations as frames for a router.

# Age of the engine's last beat up to which the engine counts as alive: two beats of an idle engine.
_FRESH_BEAT_SECONDS = 0.5


class FrameStream(StreamingResponse):
    """Response of frames. It frees the engine slots however it ends, also when the router hangs up."""

    def __init__(self, service: Service, request: contract.OpenStream) -> None:
        self._service, self._request = service, request
        self._channel = FrameChannel(lambda: _alive(service), service.config.engine.block_port or 0)
        self._started: StartedRequest | None = None
        super().__init__(self._channel.encoded(), media_type=contract.CONTENT_TYPE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the frames, then end the request."""
        listeners = self._service.lifecycle.on_leave
        listeners.add(self._channel.move)
        work = asyncio.create_task(self._put_frames())
        try:
            await super().__call__(scope, receive, send)
        finally:
            listeners.discard(self._channel.move)
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            if self._started is not None:
                self._started.close(moved=self._channel.moved)

    async def _put_frames(self) -> None:
        """Put all frames on the channel. Every error becomes the last frame."""
        try:
            await self._generate()
        except ApiError as error:
            await self._channel.put(error_frame(error))
        except Exception:
            log.exception("an internal stream failed")
            failed = EngineFailed("the server failed on this request; its log says why", code="internal_error")
            await self._channel.put(error_frame(failed))

    async def _generate(self) -> None:
        """Start the generations and put their frames on the channel. Raises ApiError."""
        request, lifecycle = self._request, self._service.lifecycle
        lifecycle.check_accepting()
        if lifecycle.shutting_down:
            raise Unavailable("this worker is shutting down", code="draining")
        started = self._started = await start(self._service, request.route, _call_of(request, self._service))
        delivered = _delivered(request, len(started.generations))
        await self._channel.put(_open_frame(started, self._service.compatibility_key))
        readers = [_ChoiceReader(started, index, self._channel, count) for index, count in enumerate(delivered)]
        await _all_or_first_error([reader.run() for reader in readers])
        if started.body.stream:
            body = b"".join(started.closing())
        else:
            choices = [one.choice(reader.pieces) for one, reader in zip(started.generations, readers, strict=True)]
            body = await started.encode_whole(choices)
            if len(body) > MAX_BODY_BYTES:  # refused here, else the router takes it for a failure of this worker
                raise BadRequest(
                    f"the answer has {len(body)} bytes, and behind a router it may have {MAX_BODY_BYTES} bytes. "
                    "Stream it, or ask for fewer tokens, choices or logprobs",
                    param="logprobs",
                )
        await self._channel.put(_end_frame(started, body))


class _ChoiceReader:
    """Reader of one generation, which puts its steps on the channel. ``pieces`` has the output without a stream."""

    def __init__(self, started: StartedRequest, index: int, channel: FrameChannel, delivered: int) -> None:
        self._generation, self._index, self._channel = started.generations[index], index, channel
        self._streamed = started if started.body.stream else None
        self._delivered = delivered
        # Where text is held back, the boundaries of pieces decide which events a step has, and which log-probabilities
        # wait with the text. With one piece for each token, a continuation on another worker has the same events.
        streamed_or_scored = started.body.stream or started.body.top_logprobs_count is not None
        self._one_by_one = sys.maxsize if started.writer.holds_back_text and streamed_or_scored else delivered
        self.pieces: list[ChoicePiece] = []

    async def run(self) -> None:
        """Put all steps on the channel. Raises ApiError."""
        if self._streamed is not None:
            await self._streamed.skip(self._index, self._generation.replayed)
        async for output in self._generation.outputs(one_by_one=self._one_by_one):
            events = b""
            if output.piece.is_shown and self._streamed is not None:
                if output.index + output.count <= self._delivered:
                    await self._streamed.skip(self._index, [output.piece])
                else:
                    events = b"".join(await self._streamed.events(self._index, output.piece))
            elif output.piece.is_shown:
                self.pieces.append(output.piece)
            if output.count:
                await self._channel.put(self._step(output, events))

    def _step(self, output: Output, events: bytes) -> contract.Step:
        tokens = output.tokens
        return contract.Step(
            choice=self._index,
            index=output.index,
            ids=tokens.tokens[: output.count],
            counters=self._generation.output.counters,
            logprobs=contract_logprobs(tokens.logprobs[: output.count]),
            prompt_logprobs=contract_logprobs(tokens.prompt_logprobs),
            events=events,
        )


def error_frame(error: ApiError) -> contract.Error:
    """Return the last frame of a request that failed."""
    return contract.Error(
        status=error.status,
        body=msgspec.json.encode(error.body()),
        headers=tuple(error.headers.items()),
        retryable=error.retryable,
    )


def _open_frame(started: StartedRequest, key: str) -> contract.Open:
    made = started.body.n
    return contract.Open(
        compatibility_key=key,
        prompts=tuple(tuple(prompt.ids) for prompt in started.prompts),
        choices=tuple(
            contract.ChoiceStart(prompt=index // made, sampling=msgspec.msgpack.encode(generation.sampling))
            for index, generation in enumerate(started.generations)
        ),
        created=started.writer.context.created,
        stream=started.body.stream,
        opening=b"".join(started.opening()) if started.body.stream else b"",
        headers=tuple(started.headers.items()),
    )


def _end_frame(started: StartedRequest, body: bytes) -> contract.End:
    counts = usage(generation.output.statistics for generation in started.generations)
    return contract.End(
        body=body,
        prompt_tokens=counts["prompt_tokens"],
        completion_tokens=counts["completion_tokens"],
        cached_tokens=counts["prompt_tokens_details"]["cached_tokens"],
    )


def _alive(service: Service) -> contract.Alive | None:
    """Return a sign of life of the engine; None if its last beat is too old."""
    beat = service.engine.child.heartbeat
    if service.engine.ended.done() or time.monotonic() - beat.beat_seconds > _FRESH_BEAT_SECONDS:
        return None
    return contract.Alive(step=beat.step, longest_step_seconds=beat.longest_step_seconds)


def _call_of(request: contract.OpenStream, service: Service) -> Call:
    """Return the call of a stream.

    Raises:
        DeadlineExceeded: No time is left for it.
    """
    config, now, timeout = service.config.server, time.monotonic(), request.timeout_seconds
    if timeout is not None and timeout <= 0:
        raise DeadlineExceeded("the deadline of this request passed before it was complete; see X-Request-Timeout")
    limit = config.request_timeout_seconds
    return Call(
        body=request.body,
        request_id=request.request_id,
        created=_created(request),
        seed=request.seed,
        task=request.task,
        capture=request.capture,
        terms=RequestTerms(
            client=request.tenant,
            weight=request.weight,
            deadline_seconds=now + (limit if timeout is None else min(timeout, limit)),
            queue_deadline_seconds=now + config.queue_timeout_seconds,
            cache_salt=request.cache_salt,
            blocks_at=request.blocks_at,
        ),
        resume=request.resume,
    )


def _created(request: contract.OpenStream) -> int:
    """Return the Unix time of the response: that of its first attempt."""
    if request.resume is not None:
        return request.resume.open.created
    return int(time.time()) if request.created is None else request.created


def _delivered(request: contract.OpenStream, choices: int) -> tuple[int, ...]:
    """Return the number of tokens of each choice whose events the client has.

    Raises:
        BadRequest: The request has another number of choices.
    """
    delivered = (0,) * choices if request.delivered is None else request.delivered
    if len(delivered) != choices or min(delivered) < 0:
        raise invalid_value("delivered must have one count for each choice", "delivered")
    return delivered


async def _all_or_first_error(works: list[Awaitable[None]]) -> None:
    """Wait for all works. Cancel the others and raise the error if one fails."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
