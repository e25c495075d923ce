"""Calls to workers: their reports, which are read in rounds, and the plans that are pushed to them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from specdecode_operator import metrics
from specdecode_operator.errors import (
    BadReport,
    OperatorError,
    Unauthorized,
    WorkerError,
    WorkerTimeout,
    WorkerUnreachable,
)
from specdecode_operator.state.session import Baseline
from specdecode_operator.telemetry.counters import Totals, regression
from specdecode_operator.telemetry.worker_client import Reading, Unchanged, WorkerClient
from specdecode_operator.types import Key, Worker
from specdecode_worker.contract import Plan

log = logging.getLogger(__name__)

START_SECONDS = 0.1
"""Time within which the first calls of a round begin, on a busy event loop. Where the budget is the deadline of a call,
they still end by that deadline, and count as timeouts."""
MAX_BACKOFF_SECONDS = 30.0
"""Longest time between two calls of a worker that does not answer; status shows a stale report after 30 s."""
NOT_ASKED = "not asked in time"
"""Problem of a worker whose turn did not come within the round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPoll:
    """State of polling one pod. Times are seconds of the monotonic clock."""

    worker: Worker
    """The pod, as the cache has it."""
    baseline: Baseline | None = None
    """Last report that was read and believed. The next report is compared with it."""
    totals: Totals | None = None
    """Counters of that report, so that it need not be unpacked for the comparison."""
    has_report: bool = False
    """True if the latest attempt brought a report."""
    problem: str = ""
    """Reason why the latest attempt brought none. Empty before the first one."""
    asked_at: float = 0
    """Start of the latest attempt that ended with a result."""
    timeouts: int = 0
    """Attempts in a row without a complete answer."""
    not_before: float = 0
    """The worker is not asked before this time."""
    is_unauthorized: bool = False
    """True if the latest call failed because the worker accepts none of the tokens."""

    def follow(self, worker: Worker) -> WorkerPoll:
        """Return the state for the pod as it is now. A pod that became ready or moved is asked without delay."""
        restarted = (worker.ready and not self.worker.ready) or worker.address != self.worker.address
        if restarted:
            return replace(self, worker=worker, timeouts=0, not_before=0)
        return replace(self, worker=worker)

    def answered(self, answer: Reading | Unchanged, *, started: float) -> WorkerPoll:
        """Return the state after an answer to a call that started at this time."""
        asked = replace(
            self, asked_at=started, timeouts=0, not_before=0, is_unauthorized=False, has_report=True, problem=""
        )
        if isinstance(answer, Unchanged):
            assert self.baseline is not None, "an ETag is sent only with a known report"
            return replace(asked, baseline=self.baseline.at(answer.clock_seconds))
        problem = regression(self._known_totals, answer.report)
        if problem is not None:
            return replace(asked, has_report=False, problem=problem)
        return replace(
            asked,
            baseline=Baseline.of(answer.report, answer.tag),
            totals=Totals.of(answer.report),
        )

    @property
    def _known_totals(self) -> Totals | None:
        """Totals at the last contact: an unchanged report has the totals of the one before, at a later clock."""
        if self.totals is None or self.baseline is None:
            return None
        return self.totals._replace(clock_seconds=self.baseline.clock_seconds)

    def failed(self, error: Exception, *, started: float, period: float) -> WorkerPoll:
        """Return the state after a failed call. ``period`` is the time between rounds, in seconds."""
        timeouts = self.timeouts + 1 if isinstance(error, WorkerTimeout) else 0
        return replace(
            self,
            has_report=False,
            problem=str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}",
            asked_at=started,
            timeouts=timeouts,
            is_unauthorized=isinstance(error, Unauthorized),
            not_before=started + backoff_seconds(timeouts, period) if timeouts > 1 else 0,
        )

    def not_asked(self) -> WorkerPoll:
        """Return the state after a round that ended before this worker answered or was asked."""
        return replace(self, has_report=False, problem=NOT_ASKED)


def backoff_seconds(timeouts: int, period: float) -> float:
    """Return the time until the next call after that many timeouts in a row.

    It ends half a period early, so that the call belongs to the round that is nearest.
    """
    return min(MAX_BACKOFF_SECONDS, period * 2.0 ** min(timeouts - 1, 30)) - period / 2


def failure_reason(error: Exception) -> str:
    """Return the label under which a failed call is counted."""
    if isinstance(error, WorkerTimeout):
        return "timeout"
    if isinstance(error, WorkerUnreachable):
        return "unreachable"
    if isinstance(error, Unauthorized):
        return "unauthorized"
    if isinstance(error, BadReport):
        return "bad_report"
    return "refused" if isinstance(error, WorkerError) else "internal"


# --- calls ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAccess:
    """Access to the admin ports of one deployment's workers."""

    tokens: tuple[str, ...] = field(default=(), repr=False)
    """Admin tokens, the current one first."""
    tls: bool = False
    """True if the admin ports serve https."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits of open calls to workers.

    Workers whose last call timed out have places of their own, so that calls to other workers never wait for them.
    """

    total: int = 64
    """Limit for all deployments together. On a busy processor more open calls only make each of them slower."""
    per_deployment: int = 16
    slow_total: int = 32
    """Limit for the workers of all deployments whose last call timed out."""
    slow_per_deployment: int = 8


class WorkerCalls:
    """Calls of all deployments to their workers, within the limits of open calls and the budget of a round.

    Args:
        client: Client of the admin ports. It has the deadline of a single call.
        period: Time between rounds, in seconds.
        limits: Limits of open calls.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        client: WorkerClient,
        *,
        period: float,
        limits: CallLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client, self.period, self.clock = client, period, clock
        self.limits = limits or CallLimits()
        self._places = {
            False: asyncio.Semaphore(self.limits.total),
            True: asyncio.Semaphore(self.limits.slow_total),
        }
        """For workers that answered last time, and for those that timed out."""
        self.budget = max(period, client.timeout_seconds + START_SECONDS)

    async def read(self, key: Key, polls: Iterable[WorkerPoll], access: WorkerAccess) -> list[WorkerPoll]:
        """Read the reports of all workers that are due. Return the new state of every worker.

        The workers that were asked least recently go first. The round ends with its budget: workers that were not
        asked, or whose call was cut short, carry NOT_ASKED and therefore go first in the next round.
        """
        ends = asyncio.get_running_loop().time() + self.budget
        turns = {
            False: asyncio.Semaphore(self.limits.per_deployment),
            True: asyncio.Semaphore(self.limits.slow_per_deployment),
        }

        async def read(poll: WorkerPoll) -> WorkerPoll:
            if self.clock() < poll.not_before:
                return poll
            is_slow = poll.timeouts > 0
            try:
                async with asyncio.timeout_at(ends), turns[is_slow], self._places[is_slow]:
                    return await self._read_one(key, poll, access)
            except TimeoutError:
                metrics.REPORTS_FAILED.labels("not_asked").inc()
                return poll.not_asked()

        return list(await asyncio.gather(*(read(poll) for poll in sorted(polls, key=lambda poll: poll.asked_at))))

    async def push(
        self, key: Key, plans: Mapping[str, Plan], access: WorkerAccess, *, limit: float | None = None
    ) -> None:
        """Push plans by address, within ``limit`` seconds: then another process may lead.

        A failed push is not repeated here: the next report shows whether it is needed.
        """
        ends = asyncio.get_running_loop().time() + min(self.budget, math.inf if limit is None else limit)
        await asyncio.gather(*(self._push_one(key, address, plan, access, ends) for address, plan in plans.items()))

    async def _read_one(self, key: Key, poll: WorkerPoll, access: WorkerAccess) -> WorkerPoll:
        assert poll.worker.address is not None, "only workers with an address are asked"
        tag = poll.baseline.tag if poll.baseline else ""
        started = self.clock()
        try:
            answer = await self.client.report(poll.worker.address, access.tokens, tag, tls=access.tls)
            after = poll.answered(answer, started=started)
        except Exception as error:
            metrics.REPORTS_FAILED.labels(failure_reason(error)).inc()
            if not isinstance(error, OperatorError):
                log.error("%s/%s: reading the report of %s failed", *key, poll.worker.name, exc_info=error)
            return poll.failed(error, started=started, period=self.period)
        if not after.has_report:
            metrics.REPORTS_FAILED.labels("bad_report").inc()
        return after

    async def _push_one(self, key: Key, address: str, plan: Plan, access: WorkerAccess, ends: float) -> None:
        try:
            async with asyncio.timeout_at(ends), self._places[False]:
                await self.client.push(address, access.tokens, plan, tls=access.tls)
        except Exception as error:
            is_late = isinstance(error, TimeoutError)
            metrics.PUSH_FAILED.labels("not_asked" if is_late else failure_reason(error)).inc()
            log.info("%s/%s: plan %d was not pushed to %s: %s", *key, plan.version, address, error or NOT_ASKED)


class Poller:
    """Last reports of one deployment's workers, which rounds replace."""

    def __init__(self, key: Key, calls: WorkerCalls) -> None:
        self.round = 0
        """Number of rounds so far; a higher number means new reports."""
        self._key, self._calls = key, calls
        self._polls: dict[str, WorkerPoll] = {}
        """By uid of the pod."""

    async def read(self, workers: Iterable[Worker], access: WorkerAccess) -> None:
        """Read the reports of all workers that have an address and stay."""
        present = [worker for worker in workers if worker.address is not None and not worker.leaving]
        uids = {worker.uid for worker in present}
        self._forget(poll for uid, poll in self._polls.items() if uid not in uids)
        known = self._polls
        due = [
            known[worker.uid].follow(worker) if worker.uid in known else WorkerPoll(worker=worker) for worker in present
        ]
        polls = await self._calls.read(self._key, due, access)
        self._polls = {poll.worker.uid: poll for poll in polls}
        self.round += 1

    def reported(self, worker: Worker) -> Worker:
        """Return the worker with its last report, or with the reason why there is none."""
        poll = self._polls.get(worker.uid)
        if worker.leaving or worker.address is None or poll is None:
            return worker
        if poll.has_report and poll.baseline is not None:
            return replace(worker, report=poll.baseline.report, baseline=poll.baseline)
        return replace(worker, report_problem=poll.problem) if poll.problem else worker

    @property
    def is_unauthorized(self) -> bool:
        """True if a worker accepted none of the tokens in the last round."""
        return any(poll.is_unauthorized for poll in self._polls.values())

    def forget(self) -> None:
        """Drop everything, of a deployment that is gone."""
        self._forget(self._polls.values())
        self._polls = {}

    def _forget(self, polls: Iterable[WorkerPoll]) -> None:
        for poll in polls:
            if poll.worker.address is not None:
                self._calls.client.forget(poll.worker.address)
