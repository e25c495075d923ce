"""From the body of a request to its answer, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol, TypeVar

import msgspec
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from specdecode_worker.contract.internal_stream import Resume
from specdecode_worker.server.admission import RequestTerms
from specdecode_worker.server.errors import ApiError, ModelNotFound
from specdecode_worker.server.generation import Generation, continued_choices, earlier_choices
from specdecode_worker.server.grammars import guided_format
from specdecode_worker.server.prompts import Prompt
from specdecode_worker.server.request_capture import capture_permitted
from specdecode_worker.server.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    NamedToolChoice,
    StreamOptions,
    ignored_header,
    parse,
    unsupported,
)
from specdecode_worker.server.responses import (
    DONE,
    ChatWriter,
    ChoicePiece,
    CompletionWriter,
    FinishedChoice,
    Json,
    ReasoningOf,
    ResponseContext,
    ResponseWriter,
    ToolCallOptions,
    event,
    usage,
)
from specdecode_worker.server.service import Service
from specdecode_worker.server.tools import other_format_of, parser_for, reasoning_parser

# Preparation of a generation request: parse, check, render, tokenize, start. Public and internal routes share it.

Result = TypeVar("Result")
Body = TypeVar("Body", bound=GenerationRequest)


class Wait(Protocol):
    """Function that returns the result of slow work. It may give up with an error if the result is not needed."""

    async def __call__(self, work: Awaitable[Result], /) -> Result:
        """Return the result of ``work``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call of a generation route."""

    body: bytes
    request_id: str
    created: int
    """Unix time of the response in seconds."""
    task: str | None = None
    """Task label of the header."""
    capture: str | None = None
    """Header that permits or forbids capture."""
    terms: RequestTerms
    resume: Resume | None = None
    """Earlier attempt on another worker, which this call continues."""
    seed: int | None = None
    """Seed for a body that has none."""

    def parse(self, model: type[Body]) -> Body:
        """Return the validated body. Raises BadRequest."""
        body = parse(model, self.body)
        return body if body.seed is not None or self.seed is None else body.model_copy(update={"seed": self.seed})


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """Request whose generations have started. They must be closed in every case."""

    body: GenerationRequest
    prompts: Sequence[Prompt]
    generations: list[Generation]
    writer: ResponseWriter

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response that depend on the body."""
        return ignored_header(self.body.ignored_fields)

    @property
    def stream_options(self) -> StreamOptions:
        """Options of a streaming response."""
        return self.body.stream_options or StreamOptions()

    async def encode_whole(self, choices: Sequence[FinishedChoice]) -> bytes:
        """Return the body of a response that does not stream."""
        if self.body.top_logprobs_count is None:
            return msgspec.json.encode(self.writer.whole(choices))
        # Log-probabilities can take a second to write.
        return await asyncio.to_thread(lambda: msgspec.json.encode(self.writer.whole(choices)))


_BODIES: Mapping[str, type[CompletionRequest | ChatRequest]] = MappingProxyType(
    {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
)
GENERATION_ROUTES = tuple(_BODIES)
"""Public routes that generate text."""


async def start(service: Service, route: str, call: Call, wait: Wait) -> StartedRequest:
    """Start the generations of a request to a public route.

    Raises:
        ApiError: The request is invalid, or the worker cannot serve it.
    """
    if route not in _BODIES:
        raise ModelNotFound(f"there is no generation route {route!r}", code="not_found")
    body = call.parse(_BODIES[route])
    service.check_model_name(body.model)
    body = service.model.with_defaults(body)
    writer: ResponseWriter
    if isinstance(body, ChatRequest):
        text, count = body.text, 1
        writer = ChatWriter(_context(service, call, body), _tool_call_options(service, body), _reasoning(service, body))
    else:
        text, count = "\n".join(prompt for prompt in body.prompt if isinstance(prompt, str)), len(body.prompt)
        writer = CompletionWriter(_context(service, call, body))
    if call.resume is not None:
        started = await _resume(service, call, call.resume, body, text, writer, wait)
    else:
        with service.preparing(body, count, call.terms.client) as preparation:
            prompts = await wait(preparation.prompts(body))
        task = service.plans.task(call.task, body.task, text, call.terms.client)
        capture = capture_permitted(call.capture, body)
        generations = service.start(body, prompts, task, capture=capture, terms=call.terms)
        started = StartedRequest(body, prompts, generations, writer)
    writer.begin(started.prompts[0].ids)
    service.ignored_fields.record(started.body.ignored_fields, time.monotonic())
    return started


async def _resume(
    service: Service,
    call: Call,
    resume: Resume,
    body: GenerationRequest,
    text: str,
    writer: ResponseWriter,
    wait: Wait,
) -> StartedRequest:
    earlier = earlier_choices(body, resume, service.compatibility_key, service.model.limits)
    with service.preparing(body, len(resume.open.prompts), call.terms.client) as preparation:
        prompts = await wait(preparation.resumed(body, resume.open.prompts))
        work = partial(continued_choices, service.model, body, prompts, earlier)
        choices = await wait(preparation.replay(sum(len(progress.ids) for _, progress in earlier), work))
    task = service.plans.task(call.task, body.task, text, call.terms.client)
    return StartedRequest(body, prompts, service.resume(body, choices, task, terms=call.terms), writer)


def _context(service: Service, call: Call, body: GenerationRequest) -> ResponseContext:
    return ResponseContext(
        request_id=call.request_id,
        model=body.model,
        fingerprint=service.model.fingerprint,
        vocabulary=service.model.tokenizer.vocabulary,
        logprobs=body.top_logprobs_count is not None,
        created=call.created,
        num_spec_tokens=service.plans.current.deepest,
    )


def _tool_call_options(service: Service, body: ChatRequest) -> ToolCallOptions | None:
    """Return the tool call options; None if the request offers no tools.

    Raises:
        BadRequest: The chat template takes no tools, or its tool call format is unknown.
    """
    if not body.shown_tools:
        return None
    template = service.model.tokenizer.template
    if template is None or not template.takes_tools:
        raise unsupported("this model's chat template takes no tools", "tools")
    name = service.config.server.tool_call_parser or service.model.tool_format
    if name is None:
        other = other_format_of(template.tool_source)
        what = f"writes calls in the format {other}, which has no parser here" if other else "names no format of calls"
        raise unsupported(f"this model's chat template {what}; leave tools out, or start the worker with "
                          "--tool-call-parser for another format that the model knows", "tools")  # fmt: skip
    functions = [tool.function.name for tool in body.tools]
    parser = partial(parser_for, guided_format(name) if body.guides_calls else name, functions)
    named = isinstance(body.tool_choice, NamedToolChoice)
    return ToolCallOptions(parser, parallel=body.parallel_tool_calls, named=named)


def _reasoning(service: Service, body: ChatRequest) -> ReasoningOf | None:
    """Return the function from a prompt to the parser of thinking; None if answers have none.

    An answer that must follow a format or be a call has no thinking before it.
    """
    name = service.config.server.reasoning_parser
    if name is None or body.has_format or body.forced_tools:
        return None
    return partial(reasoning_parser, name, service.model.tokenizer)


# Streaming responses: merges the pieces of all choices into server-sent events.

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
    """Yield the encoded events. An engine error becomes the last event of the stream.

    The opening events come with the first token, so that clients which time the first event measure the time to it.
    """
    opening = encoder.opening()
    try:
        async for index, piece in _merged(encoder.generations):
            for one in opening:
                yield one
            opening = []
            for one in await encoder.encode(index, piece) if piece.is_shown else ():
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
        async for output in generations[0].outputs():
            yield 0, output.piece
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
        async for output in generation.outputs():
            await queue.put((index, output.piece))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


def close(generations: Sequence[Generation]) -> None:
    """Close all generations, which frees their slots in the engine."""
    for generation in generations:
        generation.close()
