"""A worker as its routes see it: the engine, the tokenizer, the plan in force, and the state of life.

Turns a checked request into generations, all or none, and passes on what the admin port asks for.
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
from specdecode_worker.metrics import Counts
from specdecode_worker.server.admission import Line
from specdecode_worker.server.errors import BadRequest, Conflict, ModelNotFound, Unavailable
from specdecode_worker.server.generation import Generation, Watcher, Wish
from specdecode_worker.server.lifecycle import Lifecycle
from specdecode_worker.server.plan_store import Plans
from specdecode_worker.server.request_capture import Capturing
from specdecode_worker.server.request_sampling import Limits, check_ids, logprobs_of, sampling_of, seeds_of, token_limit
from specdecode_worker.server.requests import CompletionRequest, GenerationRequest
from specdecode_worker.server.text.detokenizer import Reading
from specdecode_worker.server.text.prompts import Prompt
from specdecode_worker.server.text.tokenizer import Tokenizer
from specdecode_worker.server.tools.parser_choice import format_of
from specdecode_worker.server.version import VERSION


@dataclass(frozen=True)
class Model:
    """What is known once the model has loaded."""

    tokenizer: Tokenizer
    loaded: Loaded

    @property
    def limits(self) -> Limits:
        return Limits(self.loaded.max_model_len, self.tokenizer.vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the weights and with this program, and with nothing else: a draft changes no text."""
        return "fp_" + hashlib.sha256(f"{self.loaded.target} {VERSION}".encode()).hexdigest()[:10]

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How its chat template has tool calls written; None when it knows of no tools."""
        template = self.tokenizer.template
        return format_of(template.tool_source) if template is not None and template.takes_tools else None


class Service:
    """One worker. ``model`` is None while it loads; without a ``recorder`` nothing is captured."""

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
        self.plans = Plans(config.deployment_uid, plan)
        self.counts = Counts(time.monotonic, recorder.counts if recorder else None)
        self.started_seconds = int(time.time())
        self._line = Line(config.engine.max_num_seqs, config.server.max_waiting)
        self._model: Model | None = None
        self._recorder = recorder
        self._capturing: Capturing | None = None
        self._plan_lock = asyncio.Lock()

    def check_loaded(self) -> None:
        """Raises Unavailable while the model loads."""
        if self._model is None:
            raise Unavailable("the model is still loading", code="loading")

    def model_loaded(self, model: Model) -> None:
        self._model = model
        if self._recorder is not None:
            self._capturing = Capturing(self._recorder, model.loaded.target, self.config.engine.sampler)
        self.lifecycle.serve()

    @property
    def model(self) -> Model:
        """Raises Unavailable while it loads."""
        self.check_loaded()
        assert self._model is not None
        return self._model

    @property
    def limits(self) -> Limits | None:
        """The model's; None while it loads."""
        return None if self._model is None else self._model.limits

    def check_model_name(self, name: str | None) -> None:
        """Raises ModelNotFound. Who names none means the one there is."""
        served = self.config.model.served_name
        if name is not None and name != served:
            raise ModelNotFound(f"the model {name!r} does not exist here; {served!r} is served", param="model")

    def start(
        self, request: GenerationRequest, prompts: Sequence[Prompt], task: str, *, capture: bool = True
    ) -> list[Generation]:
        """``request.choices_made`` generations to each prompt, in that order, all or none. Raises ApiError.

        ``capture`` is whether the client lets them be captured."""
        limits, made = self.model.limits, request.choices_made
        check_ids(request, limits)
        token_limits = [token_limit(request, prompt.ids, limits) for prompt in prompts]
        self.lifecycle.check_accepting()
        field = "prompt" if len(prompts) > 1 else "n"
        self._line.check(self.engine.in_flight, len(prompts) * made, time.monotonic(), field)
        if self._capturing is not None and not capture:
            self._capturing.opted_out()
        with contextlib.ExitStack() as started:
            generations = []
            for prompt, limit in zip(prompts, token_limits, strict=True):
                for choice, seed in enumerate(seeds_of(request.seed, made)):
                    sampling = sampling_of(request, limit, seed, limits)
                    generation = self._generation(prompt, sampling, _wish(request, choice), task, capture)
                    started.callback(generation.close)
                    generations.append(generation)
            started.pop_all()
        return generations

    async def set_plan(self, plan: Plan) -> None:
        """Raises Conflict, BadRequest, Unavailable."""
        self.check_loaded()
        async with self._plan_lock:
            self.plans.check(plan)
            with _engine_errors():
                await self.engine.set_plan(plan)
            self.plans.current = plan

    async def set_draft(self, draft: DraftConfig, name: str) -> None:
        """Returns once it has taken over. Raises Conflict with the engine's reason, Unavailable."""
        self.check_loaded()
        with _engine_errors(Conflict):
            await self.engine.set_draft(draft, name)

    async def set_synthetic(self, knobs: SyntheticKnobs | None) -> None:
        """Raises BadRequest, Unavailable."""
        self.check_loaded()
        with _engine_errors():
            await self.engine.set_synthetic(knobs)

    async def report(self) -> Report:
        """Raises Unavailable."""
        self.check_loaded()
        with _engine_errors():
            report = await self.engine.report()
        return report.model_copy(update={"draining": self.lifecycle.leaving})

    def _generation(self, prompt: Prompt, sampling: Sampling, wish: Wish, task: str, capture: bool) -> Generation:
        now = time.monotonic()
        submit = Submit(
            request_id=uuid.uuid4().hex, prompt=tuple(prompt.ids), sampling=sampling, task=task, arrival_seconds=now
        )
        try:
            stream = self.engine.submit(submit)
        except EngineGone as error:
            raise Unavailable(f"the engine is gone: {error}", code="engine_gone") from None
        return Generation(
            stream,
            self.model.tokenizer,
            prompt,
            wish,
            watchers=self._watchers(prompt, sampling, task, capture and wish.answers),
            ended=lambda: self._line.ended(time.monotonic()),
        )

    def _watchers(self, prompt: Prompt, sampling: Sampling, task: str, capture: bool) -> list[Watcher]:
        found: list[Watcher] = [self.counts.observer(task, len(prompt.ids))]
        if capture and self._capturing is not None:
            watch = self._capturing.watch(prompt, sampling, task)
            found += [watch] if watch is not None else []
        return found


def _wish(request: GenerationRequest, choice: int) -> Wish:
    reading = Reading(
        stops=tuple(request.stop),
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        min_tokens=request.min_tokens,
        logprobs=request.logprobs_wanted is not None,
    )
    answers = not isinstance(request, CompletionRequest) or request.max_tokens != 0
    return Wish(reading, scored=logprobs_of(request) is not None, answers=answers, counts_prompt=choice == 0)


@contextlib.contextmanager
def _engine_errors(refused: type[BadRequest] | type[Conflict] = BadRequest) -> Iterator[None]:
    """Translates what the engine's client raises."""
    try:
        yield
    except CallRefused as error:
        raise refused(f"the engine refused: {error}") from None
    except EngineGone as error:
        raise Unavailable(f"the engine is gone: {error}", code="engine_gone") from None
