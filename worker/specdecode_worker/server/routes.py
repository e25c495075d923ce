"""The public port: OpenAI's routes, health and readiness, metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from specdecode_worker import metrics
from specdecode_worker.server.answers import DONE, ChatFormat, CompletionFormat, Format, event
from specdecode_worker.server.errors import ApiError, BadRequest, TemplateRefused, TokenizerProblem
from specdecode_worker.server.generation import Generation, Piece
from specdecode_worker.server.http import CloseWhenLeaving, answer_errors, read_body, unless_gone
from specdecode_worker.server.requests import ChatRequest, CompletionRequest, GenerationRequest, parse
from specdecode_worker.server.service import Service

TASK_HEADER = "X-Specdecode-Task"
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def public_app(service: Service) -> FastAPI:
    """The application of the public port."""
    app = FastAPI(title="specdecode", openapi_url=None)
    app.add_middleware(CloseWhenLeaving, lifecycle=service.lifecycle)
    answer_errors(app)
    _add_probes(app, service)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        service.lifecycle.check_accepting()
        body = parse(CompletionRequest, await read_body(request))
        service.check_model_name(body.model)
        encode = service.model.tokenizer.encode
        prompts = [await asyncio.to_thread(encode, p) if isinstance(p, str) else p for p in body.prompt]
        task = _task(service, request, "\n".join(p for p in body.prompt if isinstance(p, str)))
        generations = service.start(body, prompts, task)
        return await _answer(request, body, generations, CompletionFormat(body.model))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        service.lifecycle.check_accepting()
        body = parse(ChatRequest, await read_body(request))
        service.check_model_name(body.model)
        prompt = await asyncio.to_thread(_chat_prompt, service, body)
        task = _task(service, request, "\n".join(message.content for message in body.messages))
        generations = service.start(body, [prompt], task)
        return await _answer(request, body, generations, ChatFormat(body.model))

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model_card(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model_name(name)
        return JSONResponse(_model_card(service))

    return app


def _add_probes(app: FastAPI, service: Service) -> None:
    lifecycle = service.lifecycle

    @app.get("/health")
    async def health() -> Response:
        return PlainTextResponse(lifecycle.failure or "ok\n", status_code=200 if lifecycle.healthy else 503)

    @app.get("/ready")
    async def ready() -> Response:
        return PlainTextResponse(f"{lifecycle.state.name.lower()}\n", status_code=200 if lifecycle.ready else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        body = metrics.render(await service.report(), service.counts)
        return Response(body, media_type=metrics.CONTENT_TYPE)


def _chat_prompt(service: Service, body: ChatRequest) -> list[int]:
    # Templates know OpenAI's older name of the role.
    roles = {"developer": "system"}
    messages = [
        {**message.model_dump(exclude_none=True), "role": roles.get(message.role, message.role)}
        for message in body.messages
    ]
    try:
        return service.model.tokenizer.chat(messages)
    except (TemplateRefused, TokenizerProblem) as error:
        raise BadRequest(str(error), param="messages", code="invalid_value") from None


def _task(service: Service, request: Request, prompt: str) -> str:
    return service.plans.task(request.headers.get(TASK_HEADER), prompt)


def _model_card(service: Service) -> dict[str, object]:
    return {
        "id": service.config.model.served_name,
        "object": "model",
        "created": service.started_seconds,
        "owned_by": "specdecode",
        "max_model_len": service.model.loaded.max_model_len,
    }


async def _answer(request: Request, body: GenerationRequest, generations: list[Generation], form: Format) -> Response:
    if body.stream:
        return _EventStream(_events(generations, form, body.stream_options.include_usage), generations)
    try:
        choices = await unless_gone(request, asyncio.gather(*(generation.whole() for generation in generations)))
        return JSONResponse(form.whole(list(choices)))
    finally:
        _close(generations)


class _EventStream(StreamingResponse):
    """Server-sent events that free the engine's slots however they end, even before the first event."""

    def __init__(self, events: AsyncIterator[bytes], generations: Sequence[Generation]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_SSE_HEADERS)
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _close(self._generations)


async def _events(generations: Sequence[Generation], form: Format, include_usage: bool) -> AsyncIterator[bytes]:
    # With include_usage every chunk has the field, null in all but the last: so OpenAI's reference says.
    rest = {"usage": None} if include_usage else {}
    for index in range(len(generations)):
        if (opening := form.opening(index)) is not None:
            yield event(opening | rest)
    try:
        async for index, piece in _merged(generations):
            yield event(form.chunk(index, piece.text, piece.finish_reason) | rest)
    except ApiError as error:
        yield event(error.body())
        return
    if include_usage:
        yield event(form.closing([generation.statistics for generation in generations]))
    yield DONE


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


def _close(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.close()
