"""One round of calls to the workers of one deployment: reports first, then pushes of plans."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from specdecode_operator.errors import OperatorError
from specdecode_operator.telemetry.call_slots import CallSlots
from specdecode_operator.telemetry.worker_client import WorkerClient
from specdecode_operator.telemetry.worker_poll import NOT_ASKED, WorkerPoll, failure_reason
from specdecode_operator.types import Key
from specdecode_worker.contract import Plan

log = logging.getLogger(__name__)

START_SECONDS = 0.1
"""Time within which the first calls of a round begin, on a busy event loop. Where the budget is the deadline of a call,
they still end by that deadline, and count as timeouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAccess:
    """Access to the admin ports of one deployment's workers."""

    tokens: tuple[str, ...] = field(default=(), repr=False)
    """Admin tokens, the current one first."""
    tls: bool = False
    """True if the admin ports serve https."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeLimits:
    """Limits of open calls to workers.

    Workers whose last call timed out have slots of their own, so that calls to other workers never wait for them.
    """

    total: int = 64
    """Limit for all deployments together.

    On a busy processor more open calls only make each of them slower: with 10,000 workers polled every 30 s on two busy
    cores, 256 open calls gave 1,893 timeouts where 64 gave 34.
    """
    per_deployment: int = 16
    """Limit for one deployment."""
    slow_total: int = 32
    """Limit for the workers of all deployments whose last call timed out."""
    slow_per_deployment: int = 8
    """Limit for the workers of one deployment whose last call timed out."""


@dataclass(slots=True)
class ScraperCounters:
    """Counts since the start of the process."""

    rounds: int = 0
    round_seconds: float = 0
    """Sum over all rounds."""
    rounds_failed: int = 0
    """Rounds that ended with an error of the operator itself."""
    reports: int = 0
    """Reports that were read and believed, unchanged ones included."""
    reports_failed: Counter[str] = field(default_factory=Counter)
    """By reason: timeout, unreachable, unauthorized, bad_report, refused, not_asked, internal."""
    pushes: int = 0
    """Plans that workers accepted."""
    pushes_failed: Counter[str] = field(default_factory=Counter)
    """By reason, as ``reports_failed``."""


class RoundCalls:
    """Calls of a round, within the limits of open calls and the budget of the round.

    Args:
        client: Client of the admin ports. It has the deadline of a single call.
        limits: Limits of open calls, shared by all deployments.
        counters: Counters to increase.
        period: Time between rounds, in seconds.
        clock: Monotonic clock, in seconds.
        wall_clock: Time of readings, in seconds since the epoch.
    """

    def __init__(
        self,
        client: WorkerClient,
        limits: ScrapeLimits,
        counters: ScraperCounters,
        *,
        period: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._client, self._counters = client, counters
        self._slots = CallSlots(total=limits.total, per_deployment=limits.per_deployment)
        self._slow_slots = CallSlots(total=limits.slow_total, per_deployment=limits.slow_per_deployment)
        self._period, self._clock, self._wall_clock = period, clock, wall_clock
        self._budget = max(period, client.timeout_seconds + START_SECONDS)

    async def read(self, key: Key, polls: Iterable[WorkerPoll], access: WorkerAccess) -> list[WorkerPoll]:
        """Read the reports of all workers that are due. Return the new state of every worker.

        The workers that were asked least recently go first. The round ends with its budget: workers that were not
        asked, or whose call was cut short, carry NOT_ASKED and therefore go first in the next round.
        """
        ends = asyncio.get_running_loop().time() + self._budget
        ordered = sorted(polls, key=lambda poll: poll.asked_at)
        due = [poll for poll in ordered if poll.target.address is not None and self._clock() >= poll.not_before]
        parts = await asyncio.gather(
            self._read_all(key, [poll for poll in due if not poll.timeouts], self._slots, access, ends),
            self._read_all(key, [poll for poll in due if poll.timeouts], self._slow_slots, access, ends),
        )
        after = {poll.target.uid: poll for part in parts for poll in part}
        return [after.get(poll.target.uid, poll) for poll in ordered]

    async def push(
        self, key: Key, plans: Mapping[str, Plan], access: WorkerAccess, *, limit: float | None = None
    ) -> None:
        """Push plans by address, within ``limit`` seconds: then another process may lead.

        A failed push is not repeated here: the next report shows whether it is needed.
        """
        ends = asyncio.get_running_loop().time() + min(self._budget, math.inf if limit is None else limit)
        pushes = (self._push_one(key, address, plan, access, ends) for address, plan in plans.items())
        await asyncio.gather(*pushes)

    async def _read_all(
        self, key: Key, polls: Iterable[WorkerPoll], slots: CallSlots, access: WorkerAccess, ends: float
    ) -> list[WorkerPoll]:
        """Read reports in this order. A call has a task once it has a slot: thousands that wait would take much memory.

        The slot is released by a callback, because a task that is cancelled before it runs has no other end.
        """
        calls: list[asyncio.Task[WorkerPoll]] = []
        unasked: list[WorkerPoll] = []
        async with asyncio.TaskGroup() as group:
            for poll in polls:
                try:
                    async with asyncio.timeout_at(ends):
                        await slots.acquire(key)
                except TimeoutError:
                    unasked.append(self._not_asked(poll))
                    continue
                calls.append(group.create_task(self._read_one(key, poll, access, ends)))
                calls[-1].add_done_callback(lambda _: slots.release(key))
        return [*(call.result() for call in calls), *unasked]

    async def _read_one(self, key: Key, poll: WorkerPoll, access: WorkerAccess, ends: float) -> WorkerPoll:
        assert poll.target.address is not None, "only workers with an address are asked"
        tag = poll.baseline.tag if poll.baseline else ""
        started = self._clock()
        try:
            async with asyncio.timeout_at(ends):
                answer = await self._client.report(poll.target.address, access.tokens, tag, tls=access.tls)
            after = poll.answered(answer, started=started, at=self._wall_clock())
        except TimeoutError:
            return self._not_asked(poll)
        except Exception as error:
            self._count_failure(key, poll, error)
            return poll.failed(error, started=started, at=self._wall_clock(), period=self._period)
        if after.reading is not None and after.reading.problem is None:
            self._counters.reports += 1
        else:
            self._counters.reports_failed["bad_report"] += 1
        return after

    def _not_asked(self, poll: WorkerPoll) -> WorkerPoll:
        self._counters.reports_failed["not_asked"] += 1
        return poll.not_asked(at=self._wall_clock())

    async def _push_one(self, key: Key, address: str, plan: Plan, access: WorkerAccess, ends: float) -> None:
        try:
            async with asyncio.timeout_at(ends), self._slots.slot(key):
                await self._client.push(address, access.tokens, plan, tls=access.tls)
        except Exception as error:
            reason = "not_asked" if isinstance(error, TimeoutError) else failure_reason(error)
            self._counters.pushes_failed[reason] += 1
            text = NOT_ASKED if isinstance(error, TimeoutError) else str(error)
            log.info("%s/%s: plan %d was not pushed to %s: %s", *key, plan.version, address, text)
        else:
            self._counters.pushes += 1

    def _count_failure(self, key: Key, poll: WorkerPoll, error: Exception) -> None:
        self._counters.reports_failed[failure_reason(error)] += 1
        if not isinstance(error, OperatorError):
            log.error("%s/%s: reading the report of %s failed", *key, poll.target.name, exc_info=error)
