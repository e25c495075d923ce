"""State machine of one request: attempts one after the other or two at a time, until the client has its answer.

An attempt ends with one of these, and the request goes on as follows:

- End: the client has its answer.
- Error that is not retryable: the client gets the error, unless another attempt runs.
- Moved, retryable Error, failed connection: the next attempt continues from the journal on another worker.

While a worker is silent, a second attempt runs too. The first of both that delivers the next token wins. If both stay
silent, the one that has been so for longer is given up for a third one.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import NoReturn
from urllib.parse import urlsplit

import msgspec

from specdecode_router.errors import ApiError, WorkerFailed
from specdecode_router.relay.attempt import Attempt, Failed, KeyDiffers, Outcome
from specdecode_router.relay.attempt_history import AttemptHistory, deadline_exceeded
from specdecode_router.relay.client_stream import ClientStream, RefusedByWorker
from specdecode_router.relay.context import RelayContext
from specdecode_router.relay.continuation_log import ContinuationLog, reason_of
from specdecode_router.relay.journal import Journal
from specdecode_router.relay.suspicion import is_suspect
from specdecode_router.relay.worker_choice import WorkerChoice
from specdecode_router.telemetry.metrics import ResumeOutcome, ResumeReason, Stage
from specdecode_router.workers.worker import Endpoint
from specdecode_worker.contract.internal_stream import (
    ALIVE_SECONDS,
    MAX_FRAME_BYTES,
    End,
    Error,
    Moved,
    Open,
    OpenStream,
    Step,
)

log = logging.getLogger(__name__)

_MAX_RUNNING = 2
"""Attempts of one request at a time."""
_DEADLINE_GRACE_SECONDS = 1.0
"""Time after the deadline for the worker to report it: its error has the same text for every client."""
_HEDGE_SECONDS = 0.25
"""Time until a second attempt is made again where no worker could be chosen."""
_LOST_FACTOR = 2
"""Multiple of ``max_silence_seconds`` without a frame after which one of two silent attempts makes room for a third."""
_RETRY_SECONDS = 0.25
"""Time until a worker is chosen again where none could be chosen."""


class Relay:
    """One request from its first attempt to its last."""

    def __init__(
        self,
        context: RelayContext,
        request: OpenStream,
        client: ClientStream,
        chooser: WorkerChoice,
        deadline: float,
        headers: Mapping[str, str],
    ) -> None:
        """Prepare a request.

        Args:
            context: What all requests share.
            request: The request; each attempt gets its own ``timeout_seconds``.
            client: Response to the client.
            chooser: Chooses the worker of each attempt.
            deadline: Time of the context's clock at which the request ends.
            headers: Headers for the workers, for example ``traceparent``.
        """
        self._context, self._limits, self._clock = context, context.limits, context.clock
        self._request, self._client, self._chooser, self._headers = request, client, chooser, headers
        self._running: dict[asyncio.Task[Outcome], Attempt] = {}
        self._wake = asyncio.Event()
        self._journal: Journal | None = None
        self._history = AttemptHistory(context.limits.max_refusals, context.limits.max_crashes)
        self._silence_factor = 1.0
        self._next_hedge = 0.0
        self._blocks_at = ""
        """Where the worker that moved the request keeps its cache blocks; for the next attempt."""
        self._deadline = deadline
        self._stranded_since: float | None = None
        """Time since which no worker takes the request; None while one has it."""
        self._log = ContinuationLog(context.metrics, self._clock())

    async def run(self) -> None:
        """Serve the request until the client has its answer.

        Raises:
            ApiError: The router ends the request.
            RefusedByWorker: A worker's error is the answer.
            ClientGone: The client disconnected or read nothing for too long.
        """
        self._context.monitor.add(self.check_silence)
        try:
            while True:
                if not self._running:
                    self._start(await self._wait_for_worker())
                await self._wait_for_event()
                for task in [task for task in self._running if task.done()]:
                    if await self._settle(task):
                        return
                self._hedge()
        except (ApiError, RefusedByWorker) as error:
            if error.status != HTTPStatus.GATEWAY_TIMEOUT:
                self._log.close(ResumeOutcome.failed)
            raise
        finally:
            self._log.close(ResumeOutcome.cancelled)
            self._context.monitor.remove(self.check_silence)
            await self._cancel(list(self._running))

    @property
    def tokens(self) -> tuple[int, int]:
        """Prompt tokens that workers computed, and output tokens, so far."""
        journal = self._journal
        return (0, 0) if journal is None else (journal.prompt_tokens, journal.tokens)

    def check_silence(self, now: float) -> None:
        """Wake the request if the worker of an attempt is silent. The suspicion ends when its frames go on."""
        for attempt in self._running.values():
            if not self._is_silent(attempt, now):
                # The bound alone may have grown, by a false suspicion of the other attempt.
                if now - attempt.signs.last_frame < self._limits.min_silence_seconds:
                    self._end_suspicion(attempt)
            elif not attempt.is_suspected:
                attempt.is_suspected = True
                self._context.workers.record_silence(attempt.endpoint.name)
                log.warning("worker %s is silent; request %s is tried on another one", attempt.endpoint.name,
                            self._request.request_id)  # fmt: skip
                self._wake.set()
            elif now >= self._next_hedge:
                self._wake.set()
        if now > self._deadline + _DEADLINE_GRACE_SECONDS:
            self._wake.set()

    def _is_silent(self, attempt: Attempt, now: float) -> bool:
        if attempt.is_paused:
            return False
        if not attempt.answered:
            return now - attempt.started > self._silence_factor * self._limits.open_seconds
        return is_suspect(attempt.signs, now, ALIVE_SECONDS, self._limits, self._silence_factor)

    def _choose(self) -> Endpoint | None:
        """Return a worker that can serve the request and is not busy with it; None without one."""
        workers, began = self._context.workers, self._clock()
        busy = (attempt.endpoint.name for attempt in self._running.values())
        exclude = frozenset(self._history.excluded(began).union(busy))
        view = self._chooser.choose(workers.views(), self._key, exclude)
        self._context.metrics.observe_added_latency(Stage.place, self._clock() - began)
        return None if view is None else view.endpoint

    async def _wait_for_worker(self) -> Endpoint:
        """Return the worker of the next attempt.

        While no worker accepts requests at all, the request waits as long as one that is held in the queue. A stream
        that has begun also waits for a place at a full worker: its client cannot try again.

        Raises:
            RefusedByWorker: The request has not begun, and the last worker that was asked has refused it.
            ApiError: No worker can serve the request in time.
        """
        if (chosen := self._choose()) is not None:
            return chosen
        workers, limits = self._context.workers, self._context.limits
        last_empty = self._clock()
        began = self._stranded_since = self._stranded_since or last_empty
        continues = self._journal is not None or self._request.delivered is not None
        with workers.stranded_request():
            while True:
                now = self._clock()
                self._check_deadline(now)
                if (chosen := self._choose()) is not None:
                    return chosen
                if not continues and (refusal := self._history.final_refusal()) is not None:
                    raise RefusedByWorker(refusal)
                if not workers.capacity:
                    last_empty = now
                if now >= min(last_empty + limits.no_worker_seconds, began + limits.hold_seconds):
                    raise self._history.no_worker(continues=continues)
                await workers.wait_for_change(_RETRY_SECONDS)

    @property
    def _key(self) -> str:
        """Compatibility key of the workers that can serve the request; empty for any."""
        return "" if self._journal is None else self._journal.open.compatibility_key

    def _start(self, endpoint: Endpoint) -> Attempt:
        """Start an attempt: from the journal, if the request has one.

        Raises:
            ApiError: The journal has become too long for a worker to read.
        """
        left = max(self._deadline - self._clock(), 0.001)
        resume = None if self._journal is None else self._journal.resume()
        blocks_at, self._blocks_at = self._blocks_at, ""
        request = msgspec.structs.replace(self._request, timeout_seconds=left, resume=resume, blocks_at=blocks_at)
        attempt = Attempt(endpoint, request, self._context, self._take, self._headers)
        if len(attempt.body) > MAX_FRAME_BYTES:
            self._next_hedge = math.inf
            message = "this request must go on on another worker, and has too much output for that"
            raise ApiError(500, message, code="worker_failed", headers={"X-Should-Retry": "false"})
        self._context.workers.begin_stream(endpoint.name, self._request.tenant)
        task = asyncio.create_task(attempt.run())
        task.add_done_callback(lambda _: self._wake.set())
        self._running[task] = attempt
        return attempt

    def _hedge(self) -> None:
        """Start a second attempt if every running one is silent. Two that stay silent make room for another one.

        Once a worker has accepted the request, refusals and crashes of further workers do not end it here, nor does a
        journal that is too long: the stream may only be slow.
        """
        now, running = self._clock(), self._running
        if not running or now < self._next_hedge or not all(self._is_silent(one, now) for one in running.values()):
            return
        self._next_hedge = now + _HEDGE_SECONDS
        if len(running) >= _MAX_RUNNING:
            task, attempt = min(running.items(), key=lambda one: one[1].signs.last_frame)
            if now - attempt.signs.last_frame > _LOST_FACTOR * self._limits.max_silence_seconds:
                self._context.workers.record_failure(attempt.endpoint.name)
                self._history.add_failure(attempt.endpoint.name, now, crashed=False)
                self._log.lose(attempt)
                task.cancel()
            return
        try:
            self._history.check()
            if (endpoint := self._choose()) is not None:
                self._log.begin_hedge(self._start(endpoint))
                if self._journal is not None:
                    self._log.begin(ResumeReason.silence)
        except (ApiError, RefusedByWorker):
            if self._journal is None:
                raise

    async def _take(self, attempt: Attempt, frame: Open | Step) -> None:
        """Use a frame of a running attempt: journal it, and send it to the client.

        Nothing is awaited before the frame is in the transport of the client, so that frames of two attempts cannot
        be sent in another order than they were journaled.
        """
        if isinstance(frame, Open):
            await self._take_open(attempt, frame)
            return
        if self._journal is None:
            raise WorkerFailed("it sent a step before the first frame")
        if not self._journal.add(frame):
            return
        self._win(attempt)
        if frame.events or (frame.index == 0 and self._journal.open.opening):
            attempt.is_paused = True
            await self._client.write(frame)
            self._context.metrics.observe_added_latency(Stage.write, self._clock() - attempt.signs.last_frame)
            await self._client.drain()
            attempt.is_paused = False
            now = self._clock()
            self._log.last_token = now
            attempt.signs.end_pause(now)

    async def _take_open(self, attempt: Attempt, opened: Open) -> None:
        if self._journal is None:
            if not self._client.accepts(opened):
                self._reject(attempt, opened)
            self._journal = Journal(opened)
            self._context.workers.record_key(attempt.endpoint.name, opened.compatibility_key)
            self._win(attempt)
            await self._client.open(opened)
        elif attempt.resumed and opened.compatibility_key != self._journal.open.compatibility_key:
            self._reject(attempt, opened)
        self._stranded_since = None

    def _reject(self, attempt: Attempt, opened: Open) -> NoReturn:
        """Leave a worker out that would give the request another text."""
        self._context.workers.record_key(attempt.endpoint.name, opened.compatibility_key)
        self._history.exclude(attempt.endpoint.name)
        raise KeyDiffers("it would give the request another text")

    def _win(self, attempt: Attempt) -> None:
        """Cancel all other attempts, because this one delivered first."""
        if self._log.is_open:
            self._log.deliver(attempt, self._clock())
        attempt.delivered = True
        self._end_suspicion(attempt)
        if len(self._running) == 1:
            return
        for task, other in self._running.items():
            if other is not attempt:
                if other.is_suspected:
                    self._context.workers.record_failure(other.endpoint.name)
                task.cancel()

    def _end_suspicion(self, attempt: Attempt) -> None:
        if not attempt.is_suspected:
            return
        attempt.is_suspected = False
        self._silence_factor *= 2
        self._context.workers.end_silence(attempt.endpoint.name)

    async def _wait_for_event(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        self._check_deadline(self._clock())

    async def _settle(self, task: asyncio.Task[Outcome]) -> bool:
        """Handle the end of an attempt. Return True if the request is complete."""
        attempt = self._running.pop(task)
        self._leave(attempt)
        if task.cancelled():
            return False
        outcome = task.result()
        if isinstance(outcome, End):
            if self._journal is None:
                outcome = Failed("it ended the stream before the first frame", answered=True)
            else:
                self._win(attempt)
                self._chooser.record_end(attempt.endpoint.name, outcome)
                await self._cancel(list(self._running))
                await self._client.end(outcome.body)
                return True
        self._note(attempt, outcome)
        if not self._running:
            if isinstance(outcome, Error) and not outcome.retryable:
                raise RefusedByWorker(outcome)
            self._history.check()
        return False

    def _note(self, attempt: Attempt, outcome: Error | Moved | Failed) -> None:
        """Record why an attempt ended, in the history of the request and in the table of workers."""
        name, workers = attempt.endpoint.name, self._context.workers
        self._log.lose(attempt)
        if opened := self._journal is not None:
            self._log.begin(reason_of(outcome))
        if isinstance(outcome, Moved):
            workers.record_draining(name)
            if outcome.block_port:
                host = urlsplit(attempt.endpoint.admin_url).netloc.rpartition(":")[0]
                self._blocks_at = f"{host}:{outcome.block_port}"
            self._history.add_move(name, self._clock())
        elif isinstance(outcome, Error):
            self._history.add_refusal(name, outcome, self._clock(), opened=opened)
        else:
            if outcome.is_fault:
                workers.record_failure(name)
            self._history.add_failure(name, self._clock(), crashed=outcome.answered)
            log.warning("worker %s failed request %s: %s", name, self._request.request_id, outcome.reason)

    def _leave(self, attempt: Attempt) -> None:
        self._context.workers.end_stream(attempt.endpoint.name, self._request.tenant)
        if attempt.is_suspected:
            attempt.is_suspected = False
            self._context.workers.end_silence(attempt.endpoint.name)

    async def _cancel(self, tasks: list[asyncio.Task[Outcome]]) -> None:
        """End attempts and close their connections, which cancels the request at their workers."""
        for task in tasks:
            task.cancel()
        for task in tasks:
            self._leave(self._running.pop(task))
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check_deadline(self, now: float) -> None:
        if now > self._deadline + _DEADLINE_GRACE_SECONDS:
            raise deadline_exceeded()
