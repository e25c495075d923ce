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
from typing import Generic, TypeVar

import msgspec
from fastapi.responses import StreamingResponse
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from specdecode_worker.capture import Recorder
from specdecode_worker.contract import OTHER_TASK, DraftConfig, Plan, Report, SyntheticKnobs, WorkerConfig, belongs
from specdecode_worker.contract.internal_stream import Resume
from specdecode_worker.core.errors import CallRefused, EngineGone
from specdecode_worker.core.messages import Submit
from specdecode_worker.drafts.draft_files import draft_hash
from specdecode_worker.drafts.swap import describe_failure
from specdecode_worker.engine.client import EngineClient
from specdecode_worker.metrics import RequestCounter, ServerCounters
from specdecode_worker.models import fetch as model_store
from specdecode_worker.server.admission import (
    AdmissionQueue,
    Model,
    ModelLimits,
    RequestTerms,
    check_ids,
    compatibility_key,
    prefix_salt,
)
from specdecode_worker.server.errors import ApiError, BadRequest, Conflict, ModelNotFound, Unavailable, unsupported
from specdecode_worker.server.generation import (
    Generation,
    StartingChoice,
    continued_choices,
    earlier_choices,
    new_choices,
    submit_of,
)
from specdecode_worker.server.grammars import AnswerGrammars, guided_format
from specdecode_worker.server.listening import Lifecycle
from specdecode_worker.server.prompts import Prompt, PromptPreparation
from specdecode_worker.server.request_capture import RequestCapture, StartRecord
from specdecode_worker.server.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    NamedToolChoice,
    StreamOptions,
    ignored_header,
    parse,
)
from specdecode_worker.server.responses import (
    DONE,
    ChatWriter,
    ChoicePiece,
    ChoiceStatistics,
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
        self.started_seconds = int(time.time())
        self._queue = AdmissionQueue(config.engine.max_num_seqs, config.server.max_waiting)
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
        self._draft_lock = asyncio.Lock()

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
    def preparing(self, request: GenerationRequest, client: str) -> Iterator[PromptPreparation]:
        """Yield the preparation of prompts for a request that has a place in the queue.

        The place counts while the block runs, so that the queue also bounds the requests whose texts are prepared.

        Args:
            request: The validated request body.
            client: Name of the request's API key; empty without keys.

        Raises:
            ApiError: The request does not fit the model, the queue is full, or the worker accepts no requests.
        """
        self.lifecycle.check_accepting()
        check_ids(request, self.model.limits)
        places = request.prompt_count * request.n
        field = "prompt" if request.prompt_count > 1 else "n"
        self._queue.check(self.engine.in_flight + self._preparing, places, time.monotonic(), field, client)
        self._preparing += places
        try:
            yield self.prompts
        finally:
            self._preparing -= places

    def check_model_name(self, name: str | None) -> None:
        """Raise ModelNotFound unless ``name`` is the served model. None means the served model."""
        served = self.config.model.served_name
        if name is not None and name != served:
            raise ModelNotFound(f"the model {name!r} does not exist here; {served!r} is served", param="model")

    def start(self, call: Call, body: GenerationRequest, choices: Sequence[StartingChoice]) -> list[Generation]:
        """Start the choices of a request. Either all of them start or none.

        A request that continues an earlier attempt is not captured.

        Args:
            call: Call of the route.
            body: The validated request body, whose choices are prepared.
            choices: The choices, grouped by prompt.

        Raises:
            ApiError: The queue is full, or the worker accepts no requests.
        """
        terms = call.terms
        self.lifecycle.check_accepting()
        starting = sum(choice.output.finish_reason is None for choice in choices)
        self._queue.check(self.engine.in_flight, starting, time.monotonic(), "n", terms.client)
        start_record = None
        if self.capture is not None and call.resume is None:
            start_record = self.capture.for_request(call.capture, body)
        shared = self.config.server.shared_prefix_cache
        salt = prefix_salt(terms.client, body.cache_salt or "", shared=shared, router_salt=terms.cache_salt)
        task = self.plans.task(call.task, body.task, body.text, terms.client)
        with contextlib.ExitStack() as started:
            generations = []
            for choice in choices:
                generation = self._generation(choice, submit_of(choice, task, terms, salt), start_record)
                started.callback(generation.close)
                generations.append(generation)
            started.pop_all()
        return generations

    def _generation(self, choice: StartingChoice, submit: Submit, start_record: StartRecord | None) -> Generation:
        """Submit a choice to the engine, unless an earlier attempt has finished it. Raises Unavailable."""
        if choice.output.finish_reason is not None:
            return Generation(None, choice, self._queue, submit.client)
        with _engine_errors():
            stream = self.engine.submit(submit)
        self._queue.record_start(submit.client)
        earlier_tokens = None if submit.emitted is None else len(submit.emitted)
        counter = RequestCounter(self.counts, submit.task, len(submit.prompt), submit.client, earlier_tokens)
        record = None
        if start_record is not None and choice.output.generates:
            record = start_record(choice.prompt, submit.sampling, submit.task)
        observers = (counter,) if record is None else (counter, record)
        return Generation(stream, choice, self._queue, submit.client, observers)

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
        """Start to replace the draft ``name`` (empty for the default draft). Swaps start in the order of the calls.

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
        async with self._draft_lock:
            actual_hash = await asyncio.to_thread(self._hash_of, draft)
            if expected_hash not in (None, actual_hash):
                raise Conflict(
                    f"the files of {draft.uri or draft.method} have the hash {actual_hash}, not {expected_hash}; check "
                    "the uri, or send the hash that you mean",
                    param="expected_hash",
                )
            with _engine_errors(Conflict):
                await self.engine.begin_draft_swap(draft, name, actual_hash)
        return actual_hash

    def _hash_of(self, draft: DraftConfig) -> str:
        """Return the hash of the files of a draft. Raises Conflict if they cannot be read."""
        try:
            return draft_hash(draft, lambda uri: model_store.resolve(uri, Path(self.config.cache_dir)))
        except Exception as error:
            raise Conflict(describe_failure(error, draft.uri or draft.method)) from None

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


# Scored tokens of one piece, or pieces, beyond which they are written in a thread: about ten milliseconds.
_MANY_SCORED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class StartedRequest:
    """Request whose generations have started, which must be closed in every case, and the encoder of its response."""

    body: GenerationRequest
    prompts: Sequence[Prompt]
    generations: list[Generation]
    writer: ResponseWriter
    options: StreamOptions

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response that depend on the body."""
        return ignored_header(self.body.ignored_fields)

    def opening(self) -> list[bytes]:
        """Return the server-sent events before any text."""
        chunks = (self.writer.opening(index) for index in range(len(self.generations)))
        return [self._event(chunk) for chunk in chunks if chunk is not None]

    async def events(self, index: int, piece: ChoicePiece) -> list[bytes]:
        """Return the server-sent events for a piece of a choice."""
        # The log-probabilities of an echoed prompt can take a second to write.
        if len(piece.scored) > _MANY_SCORED_TOKENS:
            return await asyncio.to_thread(self._events, index, piece)
        return self._events(index, piece)

    async def skip(self, index: int, pieces: Sequence[ChoicePiece]) -> None:
        """Process pieces of a choice whose events another worker has sent."""
        if len(pieces) > _MANY_SCORED_TOKENS:
            await asyncio.to_thread(self._skip, index, pieces)
        else:
            self._skip(index, pieces)

    def closing(self) -> list[bytes]:
        """Return the server-sent events after the last text."""
        if not self.options.include_usage:
            return [DONE]
        return [event(self.writer.closing(self._statistics())), DONE]

    async def encode_whole(self, choices: Sequence[FinishedChoice]) -> bytes:
        """Return the body of a response that does not stream."""
        if self.body.top_logprobs_count is None:
            return msgspec.json.encode(self.writer.whole(choices))
        # Log-probabilities can take a second to write.
        return await asyncio.to_thread(lambda: msgspec.json.encode(self.writer.whole(choices)))

    def close(self, *, moved: bool = False) -> None:
        """Close the generations, which frees their slots in the engine.

        Args:
            moved: Another worker continues the request.
        """
        for generation in self.generations:
            generation.close(moved=moved)

    def _statistics(self) -> list[ChoiceStatistics]:
        return [generation.output.statistics for generation in self.generations]

    def _skip(self, index: int, pieces: Sequence[ChoicePiece]) -> None:
        for piece in pieces:
            if piece.is_shown:
                self.writer.chunks(index, piece)

    def _events(self, index: int, piece: ChoicePiece) -> list[bytes]:
        return [self._event(chunk) for chunk in self.writer.chunks(index, piece)]

    def _event(self, chunk: Json) -> bytes:
        if self.options.continuous_usage_stats:
            return event(chunk | {"usage": usage(self._statistics())})
        # OpenAI's reference: with include_usage every chunk has the field, and it is null in all but the last chunk.
        return event(chunk | ({"usage": None} if self.options.include_usage else {}))


_BODIES: Mapping[str, type[CompletionRequest | ChatRequest]] = MappingProxyType(
    {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
)
GENERATION_ROUTES = tuple(_BODIES)
"""Public routes that generate text."""


async def start(service: Service, route: str, call: Call) -> StartedRequest:
    """Start the generations of a request to a public route. A cancelled call has started none.

    Raises:
        ApiError: The request is invalid, or the worker cannot serve it.
    """
    if route not in _BODIES:
        raise ModelNotFound(f"there is no generation route {route!r}", code="not_found")
    body = call.parse(_BODIES[route])
    service.check_model_name(body.model)
    body = service.model.with_defaults(body)
    context = _context(service, call, body)
    writer: ResponseWriter
    if isinstance(body, ChatRequest):
        writer = ChatWriter(context, _tool_call_options(service, body), _reasoning(service, body))
    else:
        writer = CompletionWriter(context)
    prompts, choices = await _prepared(service, call, body)
    writer.begin(prompts[0].ids)
    generations = service.start(call, body, choices)
    return StartedRequest(body, prompts, generations, writer, body.stream_options or StreamOptions())


async def _prepared(
    service: Service, call: Call, body: CompletionRequest | ChatRequest
) -> tuple[list[Prompt], list[StartingChoice]]:
    """Return the prompts and the choices of a request, which are new ones or continue an earlier attempt."""
    model, client = service.model, call.terms.client
    if call.resume is None:
        with service.preparing(body, client) as preparation:
            prompts = await preparation.prompts(body)
            return prompts, new_choices(model, body, prompts)
    earlier = earlier_choices(body, call.resume, service.compatibility_key, model.limits)
    with service.preparing(body, client) as preparation:
        prompts = await preparation.resumed(body, call.resume.open.prompts)
        work = partial(continued_choices, model, body, prompts, earlier)
        return prompts, await preparation.replay(sum(len(progress.ids) for _, progress in earlier), work)


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
    if not body.tools or body.tool_choice == "none":
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

_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """Response of server-sent events. It frees the engine slots however it ends, even before the first event."""

    def __init__(self, started: StartedRequest) -> None:
        headers = {**_SSE_HEADERS, **started.headers}
        super().__init__(_all_events(started), media_type="text/event-stream", headers=headers)
        self._started = started

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, then close all generations."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._started.close()


async def _all_events(started: StartedRequest) -> AsyncIterator[bytes]:
    """Yield the encoded events. An engine error becomes the last event of the stream.

    The opening events come with the first token, so that clients which time the first event measure the time to it.
    """
    opening = started.opening()
    try:
        async for index, piece in _merged(started.generations):
            for one in opening:
                yield one
            opening = []
            for one in await started.events(index, piece) if piece.is_shown else ():
                yield one
    except ApiError as error:
        yield event(error.body())
        return
    for one in started.closing():
        yield one


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
