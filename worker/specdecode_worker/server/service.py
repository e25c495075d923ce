"""Worker service behind the HTTP routes: engine client, tokenizer, current plan and lifecycle state.

It turns a validated request into generations (all or none) and forwards the calls of the admin port to the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from specdecode_worker.capture import Recorder
from specdecode_worker.contract import DraftConfig, Plan, Report, SyntheticKnobs, WorkerConfig
from specdecode_worker.engine.errors import CallRefused, EngineGone
from specdecode_worker.engine.ipc.engine_client import EngineClient
from specdecode_worker.metrics import ServerCounters
from specdecode_worker.server.admission import AdmissionQueue
from specdecode_worker.server.draft_swaps import DraftSwapper
from specdecode_worker.server.errors import BadRequest, Conflict, ModelNotFound, Unavailable
from specdecode_worker.server.generation import Generation
from specdecode_worker.server.grammars.answer_grammars import AnswerGrammars
from specdecode_worker.server.lifecycle import Lifecycle
from specdecode_worker.server.plan_store import PlanStore
from specdecode_worker.server.request_capture import RequestCapture
from specdecode_worker.server.request_sampling import (
    ModelLimits,
    check_ids,
)
from specdecode_worker.server.request_terms import RequestTerms
from specdecode_worker.server.requests import GenerationRequest
from specdecode_worker.server.served_model import Model
from specdecode_worker.server.shared_call import SharedCall
from specdecode_worker.server.streams.compatibility_key import compatibility_key
from specdecode_worker.server.streams.generation_starter import GenerationStarter, Origin
from specdecode_worker.server.streams.starting_choice import StartingChoice, new_choices
from specdecode_worker.server.text.prompt_preparation import PromptPreparation
from specdecode_worker.server.text.prompts import Prompt

log = logging.getLogger(__name__)


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
        self._starter = GenerationStarter(engine, self._queue, self.counts)
        self._model: Model | None = None
        self._compatibility_key = ""
        self._prompts: PromptPreparation | None = None
        self._preparing = 0
        self._recorder = recorder
        self._capture: RequestCapture | None = None
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
        self._compatibility_key = compatibility_key(self.config, model)
        tool_format = self.config.server.tool_call_parser or model.tool_format
        grammars = AnswerGrammars(model.grammar_compiler(), tool_format)
        self._prompts = PromptPreparation(model.tokenizer, model.limits, grammars)
        if unembedded := model.limits.unembedded:
            token, text = next(iter(unembedded.items()))
            log.warning(
                "the model has no embedding for %d tokens of its tokenizer, from %r (%d) on; requests with them are "
                "refused", len(unembedded), text, token,
            )  # fmt: skip
        if self._recorder is not None:
            self._capture = RequestCapture(self._recorder, model.loaded.target, self.config.engine.sampler)
        self.lifecycle.serve()

    @property
    def model(self) -> Model:
        """The loaded model; raises Unavailable while it loads."""
        self.check_loaded()
        assert self._model is not None
        return self._model

    @property
    def recorder(self) -> Recorder | None:
        """Recorder of captured requests; None without a folder for them."""
        return self._recorder

    @property
    def capture(self) -> RequestCapture | None:
        """Capture of requests; None without a folder for it, and while the model loads."""
        return self._capture

    @property
    def compatibility_key(self) -> str:
        """Digest of everything that text depends on besides the request; empty while the model loads."""
        return self._compatibility_key

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
        places = prompts * request.generated_choices
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
        """Start ``request.generated_choices`` generations for each prompt. Either all of them start or none.

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
        start_record = self._capture.for_request(capture) if self._capture is not None else None
        return self._starter.start(choices, self._origin(request, task, terms), start_record)

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
        return self._starter.start(choices, self._origin(request, task, terms), None)

    def _origin(self, request: GenerationRequest, task: str, terms: RequestTerms) -> Origin:
        return Origin.of(request, task, terms, shared_prefix_cache=self.config.server.shared_prefix_cache)

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
            if self._recorder is not None and self.config.capture is None:
                self._recorder.apply(plan.capture)

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
            "compatibility_key": self._compatibility_key,
            "capture": None if self._recorder is None else self._recorder.report(),
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
