"""The service behind the routes: from the body of a request to its answer, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import msgspec
from fastapi.responses import StreamingResponse
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from specdecode_worker.capture import Recorder
from specdecode_worker.contract import OTHER_TASK, DraftConfig, Plan, Report, SyntheticKnobs, WorkerConfig, belongs
from specdecode_worker.contract.internal_stream import Resume
from specdecode_worker.core.errors import CallRefused, EngineGone
from specdecode_worker.drafts.draft_files import draft_hash
from specdecode_worker.drafts.swap import describe_failure
from specdecode_worker.engine.client import EngineClient
from specdecode_worker.metrics import ServerCounters
from specdecode_worker.models import fetch as model_store
from specdecode_worker.server.admission import (
    AdmissionQueue,
    Model,
    ModelLimits,
    RequestTerms,
    check_ids,
    compatibility_key,
)
from specdecode_worker.server.errors import ApiError, BadRequest, Conflict, ModelNotFound, Unavailable
from specdecode_worker.server.generation import (
    Generation,
    GenerationStarter,
    StartingChoice,
    continued_choices,
    earlier_choices,
    new_choices,
)
from specdecode_worker.server.grammars import AnswerGrammars, guided_format
from specdecode_worker.server.listening import Lifecycle
from specdecode_worker.server.prompts import Prompt, PromptPreparation
from specdecode_worker.server.request_capture import RequestCapture, capture_permitted
from specdecode_worker.server.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    IgnoredFieldLog,
    NamedToolChoice,
    StreamOptions,
    ignored_header,
    parse,
    parse_contract,
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
from specdecode_worker.server.tools import other_format_of, parser_for, reasoning_parser

log = logging.getLogger(__name__)

# Shared call: callers at the same time wait for one computation, and computations have a minimum interval.

Result = TypeVar("Result")

SHARE_SECONDS = 0.25
"""Minimum time from the start of one computation to the start of the next.

A client that polls once a second never waits for it. Clients in a tight loop cause four reports a second, together.
"""


class SharedCall(Generic[Result]):
    """Call whose result is shared by all callers that arrive before it starts.

    The result is always computed after the caller arrived, so no caller gets an old one. The price is that a caller may
    wait up to the interval.
    """

    def __init__(self, call: Callable[[], Awaitable[Result]], interval_seconds: float = SHARE_SECONDS) -> None:
        self._call = call
        self._interval_seconds = interval_seconds
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[Result] | None = None
        self._began = -interval_seconds

    async def result(self) -> Result:
        """Return the result of the next computation, or raise its error."""
        if self._next is None:
            self._next = asyncio.create_task(self._run())
            # A task whose callers are all gone has nobody to report its error to.
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._next)

    async def _run(self) -> Result:
        async with self._one_at_a_time:
            await asyncio.sleep(self._began + self._interval_seconds - time.monotonic())
            self._began = time.monotonic()
            self._next = None
            return await self._call()


# Current plan of the worker: read from the mounted file, checked against pushes, used to label requests.


class PlanStore:
    """Current plan, with the rules for its replacement.

    A new plan must have the same uid. While the draft stays the same, the version must not decrease. A version has one
    content for all workers, and one variant for workers with ``quiet`` set.
    """

    def __init__(self, uid: str, start: Plan) -> None:
        self._uid = uid
        self.current = start

    def check(self, plan: Plan) -> None:
        """Raise Conflict when ``plan`` must not replace the current plan."""
        if plan.uid != self._uid:
            raise Conflict(f"this worker belongs to uid {self._uid!r}, the plan to {plan.uid!r}", param="uid")
        current = self.current
        if plan.draft == current.draft and plan.version < current.version:
            raise Conflict(
                f"version {plan.version} is older than {current.version}, which is in force", param="version"
            )
        same = (plan.draft, plan.version, plan.quiet) == (current.draft, current.version, current.quiet)
        if same and plan != current:
            raise Conflict(f"version {plan.version} is in force with other content", param="version")

    def task(self, header: str | None, metadata: str | None, prompt: str, client: str = "") -> str:
        """Return the task label of a request: from the header, else the metadata, else the first rule that matches.

        The header is specific to specdecode, so a label that the plan does not know becomes ``other``. The key in the
        metadata may have another meaning for the client, so an unknown value there is ignored.
        """
        names = {task.name for task in self.current.tasks}
        if header is not None:
            return header if header in names else OTHER_TASK
        if metadata in names:
            return metadata
        matching = (task.name for task in self.current.tasks if belongs(task.match, task.clients, (prompt,), client))
        return next(matching, OTHER_TASK)


def parse_plan(body: bytes) -> Plan:
    """Parse and validate a plan. Raises BadRequest that names the field at fault."""
    return parse_contract(Plan, body)


def read_plan(path: Path, uid: str) -> Plan | None:
    """Read the plan mounted from the ConfigMap.

    Returns:
        The plan, or None if it is missing, unreadable or made for another uid. The worker then serves without
        speculation.
    """
    try:
        plan = Plan.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        log.error("the plan in %s cannot be used: %s", path, error)
        return None
    if plan.uid != uid:
        log.error("the plan in %s is for uid %r, this worker belongs to %r", path, plan.uid, uid)
        return None
    return plan


# Draft swaps that a client of the admin port asks for: the checks before the engine begins to load the draft.


class DraftSwapper:
    """Starts draft swaps in the order of their requests."""

    def __init__(self, engine: EngineClient, cache_dir: Path) -> None:
        self._engine, self._cache_dir = engine, cache_dir
        self._lock = asyncio.Lock()

    async def begin(self, draft: DraftConfig, name: str, expected_hash: str | None) -> str:
        """Start to replace the draft ``name`` and return the hash that the report shows once ``draft`` runs.

        Raises:
            Conflict: The files cannot be read, or do not have the expected hash.
            CallRefused: The engine cannot try the swap.
            EngineGone: The engine has ended.
        """
        async with self._lock:
            actual_hash = await asyncio.to_thread(self._hash, draft)
            if expected_hash not in (None, actual_hash):
                raise Conflict(
                    f"the files of {draft.uri or draft.method} have the hash {actual_hash}, not {expected_hash}; check "
                    "the uri, or send the hash that you mean",
                    param="expected_hash",
                )
            await self._engine.begin_draft_swap(draft, name, actual_hash)
        return actual_hash

    def _hash(self, draft: DraftConfig) -> str:
        try:
            return draft_hash(draft, lambda uri: model_store.resolve(uri, self._cache_dir))
        except Exception as error:
            raise Conflict(describe_failure(error, draft.uri or draft.method)) from None


# Worker service behind the HTTP routes: engine client, tokenizer, current plan and lifecycle state.
#
# It turns a validated request into generations (all or none) and forwards the calls of the admin port to the engine.


class Service:
    """Service of one worker. Without a ``recorder`` no request is captured."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: EngineClient,
        lifecycle: Lifecycle,
        plan: Plan,
        recorder: Recorder | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.lifecycle = lifecycle
        self.plans = PlanStore(config.deployment_uid, plan)
        self.counts = ServerCounters(
            time.monotonic, recorder.counts if recorder else None, api_keys=config.server.api_key_metrics
        )
        self.ignored_fields = IgnoredFieldLog()
        self.started_seconds = int(time.time())
        self._queue = AdmissionQueue(config.engine.max_num_seqs, config.server.max_waiting)
        self._starter = GenerationStarter(engine, self._queue, self.counts, config.server.shared_prefix_cache)
        self._model: Model | None = None
        self.compatibility_key = ""
        """Digest of everything that text depends on besides the request; empty while the model loads."""
        self._prompts: PromptPreparation | None = None
        self._preparing = 0
        self.recorder = recorder
        """Recorder of captured requests; None without a folder for them."""
        self.capture: RequestCapture | None = None
        """Capture of requests; None without a folder for it, and while the model loads."""
        self._plan_lock = asyncio.Lock()
        self._engine_report = SharedCall(engine.report)
        self._draft_swapper = DraftSwapper(engine, Path(config.cache_dir))

    def check_loaded(self) -> None:
        """Raise Unavailable while the model loads."""
        if self._model is None:
            raise Unavailable("the model is still loading", code="loading")

    def model_loaded(self, model: Model) -> None:
        """Store the loaded model and change the lifecycle to SERVING."""
        self._model = model
        self.compatibility_key = compatibility_key(self.config, model)
        tool_format = self.config.server.tool_call_parser or model.tool_format
        grammars = AnswerGrammars(model.grammar_compiler(), tool_format)
        self._prompts = PromptPreparation(model.tokenizer, model.limits, grammars)
        template = model.tokenizer.template
        if tool_format is None and template is not None and (other := other_format_of(template.tool_source)):
            log.warning("the chat template writes calls in the format %s: requests with tools are refused", other)
        if unembedded := model.limits.unembedded:
            token, text = next(iter(unembedded.items()))
            log.warning(
                "the model has no embedding for %d tokens of its tokenizer, from %r (%d) on; requests with them are "
                "refused", len(unembedded), text, token,
            )  # fmt: skip
        if self.recorder is not None:
            self.capture = RequestCapture(self.recorder, model.loaded.target, self.config.engine.sampler)
        self.lifecycle.serve()

    @property
    def model(self) -> Model:
        """The loaded model; raises Unavailable while it loads."""
        self.check_loaded()
        assert self._model is not None
        return self._model

    @property
    def limits(self) -> ModelLimits | None:
        """Context length and vocabulary size of the model; None while it loads."""
        return None if self._model is None else self._model.limits

    @property
    def prompts(self) -> PromptPreparation:
        """Preparation of prompts; raises Unavailable while the model loads."""
        self.check_loaded()
        assert self._prompts is not None
        return self._prompts

    @property
    def generations(self) -> dict[str, int]:
        """Running and waiting generations of each client."""
        return self._queue.places

    def close(self) -> None:
        """End the work on texts. The engine client is closed by its owner."""
        if self._prompts is not None:
            self._prompts.close()

    @contextlib.contextmanager
    def preparing(self, request: GenerationRequest, prompts: int, client: str = "") -> Iterator[PromptPreparation]:
        """Yield the preparation of prompts for a request that has a place in the queue.

        The place counts while the block runs, so that the queue also bounds the requests whose texts are prepared.

        Args:
            request: The validated request body.
            prompts: Number of prompts of the request.
            client: Name of the request's API key; empty without keys.

        Raises:
            ApiError: The request does not fit the model, the queue is full, or the worker accepts no requests.
        """
        self.lifecycle.check_accepting()
        check_ids(request, self.model.limits)
        places = prompts * request.n
        self._check_queue(self.engine.in_flight + self._preparing, places, prompts, client)
        self._preparing += places
        try:
            yield self.prompts
        finally:
            self._preparing -= places

    def _check_queue(self, in_flight: int, places: int, prompts: int, client: str) -> None:
        self._queue.check(in_flight, places, time.monotonic(), "prompt" if prompts > 1 else "n", client)

    def check_model_name(self, name: str | None) -> None:
        """Raise ModelNotFound unless ``name`` is the served model. None means the served model."""
        served = self.config.model.served_name
        if name is not None and name != served:
            raise ModelNotFound(f"the model {name!r} does not exist here; {served!r} is served", param="model")

    def start(
        self,
        request: GenerationRequest,
        prompts: Sequence[Prompt],
        task: str,
        *,
        capture: bool | None = None,
        terms: RequestTerms = RequestTerms(),  # noqa: B008  # frozen
    ) -> list[Generation]:
        """Start ``request.n`` generations for each prompt. Either all of them start or none.

        Args:
            request: The validated request body.
            prompts: Tokenized prompts of the request.
            task: Task label of the request.
            capture: Whether the client permits its request to be captured; None if it does not say.
            terms: Client and deadlines of the request.

        Returns:
            The generations, grouped by prompt in the order of ``prompts``.

        Raises:
            ApiError: The request does not fit the model, the queue is full, or the worker accepts no requests.
        """
        check_ids(request, self.model.limits)
        choices = new_choices(self.model, request, prompts)
        self.lifecycle.check_accepting()
        self._check_queue(self.engine.in_flight, len(choices), len(prompts), terms.client)
        start_record = self.capture.for_request(capture) if self.capture is not None else None
        return self._starter.start(request, choices, task, terms, start_record)

    def resume(
        self, request: GenerationRequest, choices: Sequence[StartingChoice], task: str, *, terms: RequestTerms
    ) -> list[Generation]:
        """Continue all choices of a request that began on another worker. It is not captured.

        Args:
            request: The validated request body.
            choices: The choices with their replayed output.
            task: Task label of the request.
            terms: Client and deadlines of the request.

        Raises:
            ApiError: The queue is full, or the worker accepts no requests.
        """
        self.lifecycle.check_accepting()
        left = sum(choice.output.finish_reason is None for choice in choices)
        self._check_queue(self.engine.in_flight, left, len(choices), terms.client)
        return self._starter.start(request, choices, task, terms)

    async def set_plan(self, plan: Plan) -> None:
        """Apply ``plan`` in the engine and make it the current plan.

        Raises:
            Conflict: ``plan`` must not replace the current plan.
            BadRequest: The engine refuses the plan.
            Unavailable: The model is loading, or the engine is gone.
        """
        self.check_loaded()
        async with self._plan_lock:
            self.plans.check(plan)
            with _engine_errors():
                await self.engine.set_plan(plan)
            self.plans.current = plan
            if self.recorder is not None and self.config.capture is None:
                self.recorder.apply(plan.capture)

    async def begin_draft_swap(self, draft: DraftConfig, name: str, expected_hash: str | None = None) -> str:
        """Start to replace the draft ``name`` (empty for the default draft).

        The report shows the swap, and the reason if it fails; the previous draft then stays in use.

        Returns:
            The hash that the report shows once ``draft`` runs.

        Raises:
            Conflict: The swap cannot be tried; the message has the reason.
            Unavailable: The model is loading, or the engine is gone.
        """
        self.check_loaded()
        try:  # the rules for drafts beside other settings are those at start
            WorkerConfig.model_validate({**self.config.model_dump(), "draft": draft})
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise Conflict(reason, param="placement") from None
        with _engine_errors(Conflict):
            return await self._draft_swapper.begin(draft, name, expected_hash)

    async def set_synthetic(self, knobs: SyntheticKnobs | None) -> None:
        """Turn the synthetic knobs on, or off with None.

        Raises:
            BadRequest: The engine refuses the knobs.
            Unavailable: The model is loading, or the engine is gone.
        """
        self.check_loaded()
        with _engine_errors():
            await self.engine.set_synthetic(knobs)

    async def report(self) -> Report:
        """Return the engine's report, completed with draining state, compatibility key and captured requests.

        Callers at the same time share one report.

        Raises:
            Unavailable: The model is loading, or the engine is gone.
        """
        self.check_loaded()
        with _engine_errors():
            report = await self._engine_report.result()
        own = {
            "draining": self.lifecycle.shutting_down,
            "compatibility_key": self.compatibility_key,
            "capture": None if self.recorder is None else self.recorder.report(),
        }
        return report.model_copy(update=own)


@contextlib.contextmanager
def _engine_errors(refused: type[BadRequest] | type[Conflict] = BadRequest) -> Iterator[None]:
    """Translate errors of the engine client: CallRefused into ``refused``, EngineGone into Unavailable."""
    try:
        yield
    except CallRefused as error:
        raise refused(f"the engine refused: {error}") from None
    except EngineGone as error:
        raise Unavailable(f"the engine is gone: {error}", code="engine_gone") from None


# From the body of a request to its answer, whole or as server-sent events.

# Preparation of a generation request: parse, check, render, tokenize, start. Public and internal routes share it.

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
        capture = None if service.capture is None else capture_permitted(call.capture, body)
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
