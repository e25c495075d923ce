"""Worker service behind the HTTP routes: engine client, tokenizer, current plan and lifecycle state.

It turns a validated request into generations (all or none) and forwards the calls of the admin port to the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from specdecode_worker.capture import Recorder
from specdecode_worker.contract import DraftConfig, Plan, Report, SyntheticKnobs, ToolFormat, WorkerConfig
from specdecode_worker.engine.errors import CallRefused, EngineGone
from specdecode_worker.engine.ipc.engine_client import EngineClient
from specdecode_worker.engine.ipc.messages import Loaded, Sampling, Submit
from specdecode_worker.metrics import ServerCounters
from specdecode_worker.server.admission import AdmissionQueue
from specdecode_worker.server.errors import BadRequest, Conflict, ModelNotFound, Unavailable
from specdecode_worker.server.generation import Generation, OutputOptions, RequestObserver
from specdecode_worker.server.lifecycle import Lifecycle
from specdecode_worker.server.plan_store import PlanStore
from specdecode_worker.server.request_capture import RequestCapture
from specdecode_worker.server.request_sampling import (
    ModelLimits,
    check_ids,
    logprobs_of,
    sampling_of,
    seeds_of,
    token_limit,
)
from specdecode_worker.server.request_terms import RequestTerms
from specdecode_worker.server.requests import CompletionRequest, GenerationRequest
from specdecode_worker.server.text.detokenizer import TextOptions
from specdecode_worker.server.text.prompts import Prompt
from specdecode_worker.server.text.tokenizer import Tokenizer
from specdecode_worker.server.tools.parser_choice import format_of
from specdecode_worker.server.version import VERSION


@dataclass(frozen=True)
class Model:
    """Tokenizer and engine facts that are known once the model has loaded."""

    tokenizer: Tokenizer
    loaded: Loaded

    @property
    def limits(self) -> ModelLimits:
        """Context length and vocabulary size of the model."""
        return ModelLimits(self.loaded.max_model_len, self.tokenizer.vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        """Value of `system_fingerprint`: it changes with the target's weights and with the program version only.

        The draft is not part of it, because speculation does not change the text.
        """
        return "fp_" + hashlib.sha256(f"{self.loaded.target} {VERSION}".encode()).hexdigest()[:10]

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """Tool call format that the chat template asks for; None when the template takes no tools."""
        template = self.tokenizer.template
        return format_of(template.tool_source) if template is not None and template.takes_tools else None


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
        self._recorder = recorder
        self._capture: RequestCapture | None = None
        self._plan_lock = asyncio.Lock()

    def check_loaded(self) -> None:
        """Raise Unavailable while the model loads."""
        if self._model is None:
            raise Unavailable("the model is still loading", code="loading")

    def model_loaded(self, model: Model) -> None:
        """Store the loaded model and change the lifecycle to SERVING."""
        self._model = model
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
    def limits(self) -> ModelLimits | None:
        """Context length and vocabulary size of the model; None while it loads."""
        return None if self._model is None else self._model.limits

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
        capture: bool = True,
        terms: RequestTerms = RequestTerms(),  # noqa: B008  # frozen
    ) -> list[Generation]:
        """Start ``request.generated_choices`` generations for each prompt. Either all of them start or none.

        Args:
            request: The validated request body.
            prompts: Tokenized prompts of the request.
            task: Task label of the request.
            capture: False when the client does not permit its request to be captured.
            terms: Client and deadlines of the request.

        Returns:
            The generations, grouped by prompt in the order of ``prompts``.

        Raises:
            ApiError: The request does not fit the model, the queue is full, or the worker accepts no requests.
        """
        limits, made = self.model.limits, request.generated_choices
        check_ids(request, limits)
        token_limits = [token_limit(request, prompt.ids, limits) for prompt in prompts]
        self.lifecycle.check_accepting()
        field = "prompt" if len(prompts) > 1 else "n"
        self._queue.check(self.engine.in_flight, len(prompts) * made, time.monotonic(), field, terms.client)
        if self._capture is not None and not capture:
            self._capture.opted_out()
        with contextlib.ExitStack() as started:
            generations = []
            for prompt, limit in zip(prompts, token_limits, strict=True):
                for choice, seed in enumerate(seeds_of(request.seed, made)):
                    sampling = sampling_of(request, limit, seed, limits)
                    options = _output_options(request, choice)
                    generation = self._generation(prompt, sampling, options, task, capture=capture, terms=terms)
                    started.callback(generation.close)
                    generations.append(generation)
            started.pop_all()
        return generations

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

    async def set_draft(self, draft: DraftConfig, name: str) -> None:
        """Replace the draft ``name`` (empty for the default draft) and return once the new draft is in use.

        Raises:
            Conflict: The engine refuses the draft; the message has its reason.
            Unavailable: The model is loading, or the engine is gone.
        """
        self.check_loaded()
        with _engine_errors(Conflict):
            await self.engine.set_draft(draft, name)

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
        """Return the engine's report, completed with the draining state.

        Raises:
            Unavailable: The model is loading, or the engine is gone.
        """
        self.check_loaded()
        with _engine_errors():
            report = await self.engine.report()
        return report.model_copy(update={"draining": self.lifecycle.shutting_down})

    def _generation(
        self,
        prompt: Prompt,
        sampling: Sampling,
        options: OutputOptions,
        task: str,
        *,
        capture: bool,
        terms: RequestTerms,
    ) -> Generation:
        submit = Submit(
            request_id=uuid.uuid4().hex,
            prompt=tuple(prompt.ids),
            sampling=sampling,
            task=task,
            arrival_seconds=time.monotonic(),
            deadline_seconds=terms.deadline_seconds,
            queue_deadline_seconds=terms.queue_deadline_seconds,
            client=terms.client,
        )
        try:
            stream = self.engine.submit(submit)
        except EngineGone as error:
            raise Unavailable(f"the engine is gone: {error}", code="engine_gone") from None
        self._queue.record_start(terms.client)
        return Generation(
            stream,
            self.model.tokenizer,
            prompt,
            options,
            observers=self._observers(prompt, submit, capture and options.generates),
            on_end=lambda: self._queue.record_end(time.monotonic(), terms.client),
            retry_after_seconds=lambda: self._queue.wait_seconds(1, time.monotonic()),
        )

    def _observers(self, prompt: Prompt, submit: Submit, capture: bool) -> list[RequestObserver]:
        observers: list[RequestObserver] = [self.counts.request_counter(submit.task, len(prompt.ids), submit.client)]
        if capture and self._capture is not None:
            observer = self._capture.start_record(prompt, submit.sampling, submit.task)
            observers += [observer] if observer is not None else []
        return observers


def _output_options(request: GenerationRequest, choice: int) -> OutputOptions:
    text_options = TextOptions(
        stops=tuple(request.stop),
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        min_tokens=request.min_tokens,
        logprobs=request.top_logprobs_count is not None,
    )
    generates = not isinstance(request, CompletionRequest) or request.max_tokens != 0
    return OutputOptions(
        text_options, has_logprobs=logprobs_of(request) is not None, generates=generates, counts_prompt=choice == 0
    )


@contextlib.contextmanager
def _engine_errors(refused: type[BadRequest] | type[Conflict] = BadRequest) -> Iterator[None]:
    """Translate errors of the engine client: CallRefused into ``refused``, EngineGone into Unavailable."""
    try:
        yield
    except CallRefused as error:
        raise refused(f"the engine refused: {error}") from None
    except EngineGone as error:
        raise Unavailable(f"the engine is gone: {error}", code="engine_gone") from None
