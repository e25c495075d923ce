"""Application of the public port, with the completion and chat completion routes of OpenAI's API."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Sequence
from functools import partial

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from specdecode_worker.server.access.reloaded_secrets import ReloadedSecrets
from specdecode_worker.server.generation import Generation
from specdecode_worker.server.request_capture import CAPTURE_HEADER, capture_permitted
from specdecode_worker.server.request_terms import terms_of
from specdecode_worker.server.requests import ChatRequest, CompletionRequest, GenerationRequest, parse
from specdecode_worker.server.requests.common import StreamOptions
from specdecode_worker.server.requests.unsupported_fields import unsupported
from specdecode_worker.server.responses import (
    ChatWriter,
    Choice,
    CompletionWriter,
    Json,
    ResponseContext,
    ResponseWriter,
    ToolCallOptions,
)
from specdecode_worker.server.routes.api_keys import ApiKeyCheck, client_name
from specdecode_worker.server.routes.body_budget import BodyBudget
from specdecode_worker.server.routes.http_app import (
    CloseConnectionsOnShutdown,
    answer_errors,
    cancel_on_disconnect,
    read_body,
)
from specdecode_worker.server.routes.information import add_information
from specdecode_worker.server.routes.tokenization import add_tokenization
from specdecode_worker.server.service import Service
from specdecode_worker.server.streaming import EventStream, close
from specdecode_worker.server.tools.parser_choice import parser_for

TASK_HEADER = "X-Specdecode-Task"
REQUEST_ID_HEADER = "X-Request-Id"
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def public_app(service: Service, api_keys: ReloadedSecrets | None = None) -> FastAPI:
    """Build the application of the public port. With ``api_keys`` a request needs one of them."""
    app = FastAPI(title="specdecode", openapi_url=None)
    app.state.body_budget = BodyBudget(service.config.server.max_unfinished_body_bytes)
    app.add_middleware(ApiKeyCheck, keys=api_keys)
    app.add_middleware(CloseConnectionsOnShutdown, lifecycle=service.lifecycle)
    answer_errors(app)
    add_information(app, service)
    add_tokenization(app, service)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        service.lifecycle.check_accepting()
        terms = terms_of(client_name(request), request.headers, service.config.server, time.monotonic())
        body = parse(CompletionRequest, await read_body(request))
        service.check_model_name(body.model)
        with service.preparing(body, len(body.prompt), terms.client) as preparation:
            prompts = await cancel_on_disconnect(request, preparation.completion(body))
        text = "\n".join(prompt for prompt in body.prompt if isinstance(prompt, str))
        capture = capture_permitted(request.headers.get(CAPTURE_HEADER), body)
        generations = service.start(body, prompts, _task(service, request, body, text), capture=capture, terms=terms)
        return await _answer(request, body, generations, CompletionWriter(_context(service, request, body)))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        service.lifecycle.check_accepting()
        terms = terms_of(client_name(request), request.headers, service.config.server, time.monotonic())
        body = parse(ChatRequest, await read_body(request))
        service.check_model_name(body.model)
        tools = _tool_call_options(service, body)
        with service.preparing(body, 1, terms.client) as preparation:
            prompt = await cancel_on_disconnect(request, preparation.chat(body))
        text = "\n".join(message.content for message in body.messages)
        capture = capture_permitted(request.headers.get(CAPTURE_HEADER), body)
        generations = service.start(body, [prompt], _task(service, request, body, text), capture=capture, terms=terms)
        return await _answer(request, body, generations, ChatWriter(_context(service, request, body), tools))

    return app


def _task(service: Service, request: Request, body: GenerationRequest, prompt: str) -> str:
    return service.plans.task(request.headers.get(TASK_HEADER), body.task, prompt)


def _context(service: Service, request: Request, body: GenerationRequest) -> ResponseContext:
    """Return the common fields of the response. The request id is the client's, if it is valid in a header."""
    sent = request.headers.get(REQUEST_ID_HEADER, "")
    return ResponseContext(
        request_id=sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex,
        model=body.model,
        fingerprint=service.model.fingerprint,
        vocabulary=service.model.tokenizer.vocabulary,
        logprobs=body.top_logprobs_count is not None,
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
        raise unsupported("this model's chat template does not tell how calls are written; start the worker with "
                          "--tool-call-parser", "tools")  # fmt: skip
    functions = [tool.function.name for tool in body.tools]
    return ToolCallOptions(partial(parser_for, name, functions), parallel=body.parallel_tool_calls)


async def _answer(
    request: Request, body: GenerationRequest, generations: list[Generation], writer: ResponseWriter
) -> Response:
    """Return the response, streaming or complete. The generations are closed in every case."""
    headers = {REQUEST_ID_HEADER: writer.request_id}
    if body.stream:
        return EventStream(generations, writer, body.stream_options or StreamOptions(), headers)
    try:
        choices = await cancel_on_disconnect(
            request, asyncio.gather(*(generation.whole() for generation in generations))
        )
        if body.top_logprobs_count is None:
            return _encoded(body, choices, writer, headers)
        # Log-probabilities can take a second to write.
        return await asyncio.to_thread(_encoded, body, choices, writer, headers)
    finally:
        close(generations)


def _encoded(
    body: GenerationRequest, choices: Sequence[Choice], writer: ResponseWriter, headers: dict[str, str]
) -> Response:
    content = msgspec.json.encode(_whole(body, choices, writer))
    return Response(content, headers=headers, media_type="application/json")


def _whole(body: GenerationRequest, choices: Sequence[Choice], writer: ResponseWriter) -> Json:
    """Return the complete response with all choices, or with the ``n`` best of each prompt for best_of."""
    made = body.generated_choices
    if made == body.n:
        return writer.whole(choices)
    by_prompt = [choices[first : first + made] for first in range(0, len(choices), made)]
    best = [one for some in by_prompt for one in sorted(some, key=lambda c: -c.mean_logprob)[: body.n]]
    return writer.whole(best, [choice.statistics for choice in choices])
