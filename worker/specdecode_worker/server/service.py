"""What the routes call: one object that holds all parts of a running server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from specdecode_worker.capture import Recorder
from specdecode_worker.contract import OTHER_TASK, DraftConfig, Plan, Report, SyntheticKnobs, WorkerConfig, belongs
from specdecode_worker.core.errors import CallRefused, EngineGone
from specdecode_worker.drafts.draft_files import draft_hash
from specdecode_worker.drafts.swap import describe_failure
from specdecode_worker.engine.client import EngineClient
from specdecode_worker.metrics import ServerCounters
from specdecode_worker.models import fetch as model_store
from specdecode_worker.server.admission import (
    AdmissionQueue,
    ModelLimits,
    RequestTerms,
    check_ids,
)
from specdecode_worker.server.errors import BadRequest, Conflict, ModelNotFound, Unavailable
from specdecode_worker.server.generation import Generation, GenerationStarter, StartingChoice, new_choices
from specdecode_worker.server.grammars import AnswerGrammars
from specdecode_worker.server.lifecycle import Lifecycle
from specdecode_worker.server.prompts import Prompt, PromptPreparation
from specdecode_worker.server.request_capture import RequestCapture
from specdecode_worker.server.requests import GenerationRequest, IgnoredFieldLog, parse_contract
from specdecode_worker.server.served_model import Model, compatibility_key
from specdecode_worker.server.tools import other_format_of

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
