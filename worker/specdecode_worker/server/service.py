"""A worker as its routes see it: the engine, the tokenizer, the plan in force, and the state of life.

Turns a checked request into generations; the rules for what is refused at that point (model name, prompt length, a
full waiting line) live here.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdecode_worker.contract import Plan, Report, SyntheticKnobs, WorkerConfig
from specdecode_worker.engine.client import EngineClient
from specdecode_worker.engine.errors import CallRefused, EngineGone
from specdecode_worker.engine.messages import Loaded, Sampling, Submit
from specdecode_worker.metrics import SpeculationCounts
from specdecode_worker.server.errors import BadRequest, ModelNotFound, TooManyWaiting, Unavailable
from specdecode_worker.server.generation import Generation
from specdecode_worker.server.lifecycle import Lifecycle
from specdecode_worker.server.plans import Plans
from specdecode_worker.server.requests import GenerationRequest
from specdecode_worker.server.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Model:
    """What is known once the model has loaded."""

    tokenizer: Tokenizer
    loaded: Loaded


class Service:
    """One worker. ``model`` is None while it loads."""

    def __init__(self, config: WorkerConfig, engine: EngineClient, lifecycle: Lifecycle, plan: Plan) -> None:
        self.config = config
        self.engine = engine
        self.lifecycle = lifecycle
        self.plans = Plans(config.deployment_uid, plan)
        self.counts = SpeculationCounts()
        self.started_seconds = int(time.time())
        self._model: Model | None = None
        self._plan_lock = asyncio.Lock()

    def check_loaded(self) -> None:
        """Raises Unavailable while the model loads."""
        if self._model is None:
            raise Unavailable("the model is still loading", code="loading")

    def model_loaded(self, model: Model) -> None:
        self._model = model
        self.lifecycle.serve()

    @property
    def model(self) -> Model:
        """Raises Unavailable while it loads."""
        self.check_loaded()
        assert self._model is not None
        return self._model

    def check_model_name(self, name: str) -> None:
        """Raises ModelNotFound."""
        served = self.config.model.served_name
        if name != served:
            raise ModelNotFound(f"the model {name!r} does not exist here; {served!r} is served", param="model")

    def check_room(self, requests: int) -> None:
        """Raises TooManyWaiting, or BadRequest for more prompts than may ever wait."""
        line = self.config.engine.max_num_seqs + self.config.server.max_waiting
        if requests > line:
            raise BadRequest(f"at most {line} prompts may come in one request", param="prompt")
        if self.engine.in_flight + requests > line:
            raise TooManyWaiting(f"{self.config.server.max_waiting} requests are waiting already; try again later")

    def start(self, request: GenerationRequest, prompts: Sequence[Sequence[int]], task: str) -> list[Generation]:
        """One generation a prompt, all or none. Raises ApiError."""
        limits = [self._token_limit(request, prompt) for prompt in prompts]
        self.lifecycle.check_accepting()
        self.check_room(len(prompts))
        with contextlib.ExitStack() as started:
            generations = []
            for prompt, limit in zip(prompts, limits, strict=True):
                generation = self._generation(request, prompt, limit, task)
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

    def _generation(self, request: GenerationRequest, prompt: Sequence[int], limit: int, task: str) -> Generation:
        submit = Submit(
            request_id=uuid.uuid4().hex,
            prompt=tuple(prompt),
            sampling=_sampling(request, limit),
            task=task,
            arrival_seconds=time.monotonic(),
        )
        try:
            stream = self.engine.submit(submit)
        except EngineGone as error:
            raise Unavailable(f"the engine is gone: {error}", code="engine_gone") from None
        return Generation(stream, self.model.tokenizer, prompt, request.stop, self.counts.observer(task))

    def _token_limit(self, request: GenerationRequest, prompt: Sequence[int]) -> int:
        """Tokens that the answer may have. Raises BadRequest for a prompt that leaves too little room."""
        longest = self.model.loaded.max_model_len
        self._check_ids(prompt)
        wanted = request.token_limit or 1
        if len(prompt) + wanted > longest:
            raise BadRequest(
                f"this model's maximum context length is {longest} tokens; the prompt has {len(prompt)} and the answer "
                f"may have {wanted}. Shorten the prompt or lower max_tokens",
                param="messages" if hasattr(request, "messages") else "prompt",
                code="context_length_exceeded",
            )
        return request.token_limit or longest - len(prompt)

    def _check_ids(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise BadRequest("the prompt is empty", param="prompt", code="invalid_value")
        size = self.model.tokenizer.vocab_size
        if not 0 <= min(prompt) <= max(prompt) < size:
            raise BadRequest(f"token ids must lie in 0..{size - 1}", param="prompt", code="invalid_value")


def _sampling(request: GenerationRequest, limit: int) -> Sampling:
    return Sampling(
        max_tokens=limit,
        seed=secrets.randbits(63) if request.seed is None else request.seed % 2**63,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(request.top_k, 0),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
    )


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    """Translates what the engine's client raises."""
    try:
        yield
    except CallRefused as error:
        raise BadRequest(f"the engine refused: {error}") from None
    except EngineGone as error:
        raise Unavailable(f"the engine is gone: {error}", code="engine_gone") from None
