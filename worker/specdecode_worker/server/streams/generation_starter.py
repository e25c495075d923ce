"""Start of generations: submits the choices of a request to the engine, all or none."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from specdecode_worker.engine.errors import EngineGone
from specdecode_worker.engine.ipc.engine_client import EngineClient
from specdecode_worker.engine.ipc.messages import Submit
from specdecode_worker.metrics import ServerCounters
from specdecode_worker.server.access.prefix_salt import prefix_salt
from specdecode_worker.server.admission import AdmissionQueue
from specdecode_worker.server.errors import Unavailable
from specdecode_worker.server.generation import Generation, RequestObserver
from specdecode_worker.server.request_capture import StartRecord
from specdecode_worker.server.request_terms import RequestTerms
from specdecode_worker.server.requests import GenerationRequest
from specdecode_worker.server.streams.starting_choice import StartingChoice


@dataclass(frozen=True, slots=True)
class Origin:
    """Facts that all generations of one request share."""

    task: str
    terms: RequestTerms
    cache_salt: str
    """Salt of the prefix cache."""
    user: str | None
    """Identifier of the end user, as the client names it."""

    @classmethod
    def of(cls, request: GenerationRequest, task: str, terms: RequestTerms, *, shared_prefix_cache: bool) -> Origin:
        """Return the origin of a request."""
        salt = prefix_salt(
            terms.client, request.cache_salt or "", shared=shared_prefix_cache, router_salt=terms.cache_salt
        )
        return cls(task, terms, salt, request.user)


class GenerationStarter:
    """Starter of generations of one worker."""

    def __init__(self, engine: EngineClient, queue: AdmissionQueue, counts: ServerCounters) -> None:
        self._engine, self._queue, self._counts = engine, queue, counts

    def start(
        self, choices: Sequence[StartingChoice], origin: Origin, start_record: StartRecord | None
    ) -> list[Generation]:
        """Start all choices of a request. Without ``start_record`` it is not captured.

        Raises:
            Unavailable: The engine is gone. No choice has started.
        """
        with contextlib.ExitStack() as started:
            generations = []
            for choice in choices:
                generation = self._generation(choice, origin, start_record)
                started.callback(generation.close)
                generations.append(generation)
            started.pop_all()
        return generations

    def _generation(self, choice: StartingChoice, origin: Origin, start_record: StartRecord | None) -> Generation:
        if choice.output.finish_reason is not None:
            return Generation(
                None, choice.output, choice.sampling, observers=(), on_end=lambda: None, replayed=choice.replayed
            )
        submit = _submit(choice, origin)
        try:
            stream = self._engine.submit(submit)
        except EngineGone as error:
            raise Unavailable(f"the engine is gone: {error}", code="engine_gone") from None
        self._queue.record_start(submit.client)
        return Generation(
            stream,
            choice.output,
            choice.sampling,
            observers=self._observers(choice, submit, origin, start_record),
            on_end=lambda: self._queue.record_end(time.monotonic(), submit.client),
            retry_after_seconds=lambda: self._queue.wait_seconds(1, time.monotonic()),
            replayed=choice.replayed,
        )

    def _observers(
        self, choice: StartingChoice, submit: Submit, origin: Origin, start_record: StartRecord | None
    ) -> list[RequestObserver]:
        earlier_tokens = None if submit.emitted is None else len(submit.emitted)
        observers: list[RequestObserver] = [
            self._counts.request_counter(submit.task, len(submit.prompt), submit.client, earlier_tokens)
        ]
        if start_record is not None and choice.generates:
            observer = start_record(choice.prompt, submit.sampling, submit.task, origin.user)
            observers += [observer] if observer is not None else []
        return observers


def _submit(choice: StartingChoice, origin: Origin) -> Submit:
    return Submit(
        request_id=uuid.uuid4().hex,
        prompt=tuple(choice.prompt.ids),
        sampling=choice.engine_sampling,
        task=origin.task,
        arrival_seconds=time.monotonic(),
        deadline_seconds=origin.terms.deadline_seconds,
        queue_deadline_seconds=origin.terms.queue_deadline_seconds,
        client=origin.terms.client,
        weight=origin.terms.weight,
        cache_salt=origin.cache_salt,
        emitted=choice.emitted,
    )
