"""Telemetry loop: polls the workers of every deployment, and pushes published plans to them.

Every deployment has its own place within each period and its own task, so that one whose workers hang delays only
itself. Results go to ``readings`` of the state table.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from specdecode_operator.errors import OperatorError
from specdecode_operator.periods import offset_of
from specdecode_operator.state.deployment_state import DeploymentState, Readings, StateTable
from specdecode_operator.telemetry.plan_push import RunningPlan, plans_to_push
from specdecode_operator.telemetry.scrape_round import RoundCalls, ScrapeLimits, ScraperCounters, WorkerAccess
from specdecode_operator.telemetry.worker_client import WorkerClient
from specdecode_operator.telemetry.worker_poll import Target, WorkerPoll
from specdecode_operator.types import Key

log = logging.getLogger(__name__)

SYNC_SECONDS = 0.5
"""Time between two comparisons of the state table with the running tasks. It delays the first round of a deployment."""
MIN_GAP_SECONDS = 0.2
"""Least time between the starts of two rounds or pushes of one deployment, however often it is nudged."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Times of one round, in seconds."""

    lateness: float
    """Delay of the start after the time at which the round was due."""
    duration: float


def next_turn(key: Key, period: float, now: float) -> float:
    """Return the next time at which a deployment is polled: its own place within each period.

    The places are spread by a hash, because all deployments become known at once after a restart.
    """
    place = offset_of(key, period)
    return place + period * math.ceil((now - place) / period)


class Scraper:
    """Polls workers until it is cancelled.

    Args:
        table: State table. The scraper writes ``readings``.
        client: Client of the admin ports.
        targets: Function that returns the pods of a deployment.
        access: Function that returns the admin tokens of a deployment.
        notify: Function that is called after ``readings`` were written.
        poll_seconds: Time between two rounds of one deployment.
        limits: Limits of open calls.
        guard: Function called before plans are pushed. It raises if this process must not write to workers, or returns
            the seconds within which the writes must end.
        on_unauthorized: Function that is called after a round in which a worker accepted none of the tokens.
        on_round: Function that is called with the times of every round, for metrics.
        clock: Monotonic clock, in seconds.
        wall_clock: Time of readings, in seconds since the epoch.
    """

    def __init__(
        self,
        table: StateTable,
        client: WorkerClient,
        *,
        targets: Callable[[Key], Sequence[Target]],
        access: Callable[[DeploymentState], WorkerAccess],
        notify: Callable[[Key], None],
        poll_seconds: float,
        limits: ScrapeLimits | None = None,
        guard: Callable[[], float | None] = lambda: None,
        on_unauthorized: Callable[[Key], None] = lambda key: None,
        on_round: Callable[[Key, RoundTimes], None] = lambda key, times: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.counters = ScraperCounters()
        self._table, self._client = table, client
        self._targets, self._access, self._notify = targets, access, notify
        self._guard, self._on_unauthorized, self._on_round = guard, on_unauthorized, on_round
        self._period, self._clock, self._wall_clock = poll_seconds, clock, wall_clock
        self._calls = RoundCalls(
            client, limits or ScrapeLimits(), self.counters, period=poll_seconds, clock=clock, wall_clock=wall_clock
        )
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._nudged: dict[Key, asyncio.Event] = {}
        self._polls: dict[Key, dict[str, WorkerPoll]] = {}
        """By deployment and uid of the pod."""

    async def run(self) -> None:
        """Poll all deployments of the table until cancelled."""
        try:
            while True:
                self._sync()
                await asyncio.sleep(SYNC_SECONDS)
        finally:
            await self._stop(tuple(self._tasks))

    def nudge(self, key: Key) -> None:
        """Push the published plans of the deployment at once, or right after the round that runs.

        Reports are read only if there are none yet: the round that led to the plans has just read them.
        """
        if key in self._nudged:
            self._nudged[key].set()

    def _sync(self) -> None:
        """Start tasks of new deployments, and cancel those of deleted ones."""
        known = set(self._table)
        ended = {key for key, task in self._tasks.items() if task.done()}
        for key in (self._tasks.keys() - known) | ended:
            self._tasks[key].cancel()
            self._drop(key)
        for key in known - self._tasks.keys():
            self._nudged[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._poll(key), name=f"scrape {'/'.join(key)}")

    async def _stop(self, keys: Sequence[Key]) -> None:
        tasks = [self._tasks[key] for key in keys]
        for key, task in zip(keys, tasks, strict=True):
            task.cancel()
            self._drop(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _drop(self, key: Key) -> None:
        del self._tasks[key], self._nudged[key]
        for poll in self._polls.pop(key, {}).values():
            self._forget(poll)

    def _forget(self, poll: WorkerPoll) -> None:
        if poll.target.address is not None:
            self._client.forget(poll.target.address)

    # --- one deployment ---------------------------------------------------------------------------------------------

    async def _poll(self, key: Key) -> None:
        """Run rounds of one deployment, whatever happens in one of them."""
        due = next_turn(key, self._period, self._clock())
        started = -math.inf
        while True:
            await self._wait(self._nudged[key], due)
            await asyncio.sleep(started + MIN_GAP_SECONDS - self._clock())
            self._nudged[key].clear()
            started = self._clock()
            if started < due and self._has_reports(key):
                await self._survive(key, self._push_again(key))
                continue
            await self._survive(key, self._round(key))
            times = RoundTimes(max(0.0, started - due), self._clock() - started)
            self._record(key, times)
            due = due + self._period if due <= started else due
            if due < self._clock() - self._period:
                due = next_turn(key, self._period, self._clock())

    async def _wait(self, nudged: asyncio.Event, due: float) -> None:
        """Wait until the round is due or nudged."""
        try:
            async with asyncio.timeout(max(0.0, due - self._clock())):
                await nudged.wait()
        except TimeoutError:
            return

    async def _survive(self, key: Key, work: Awaitable[None]) -> None:
        """Wait for a round or a push of a deployment, and log its errors."""
        try:
            await work
        except OperatorError as error:
            self.counters.rounds_failed += 1
            log.warning("%s/%s: a round of reports failed: %s", *key, error)
        except Exception:
            self.counters.rounds_failed += 1
            log.exception("%s/%s: a round of reports failed", *key)

    def _record(self, key: Key, times: RoundTimes) -> None:
        self.counters.rounds += 1
        self.counters.round_seconds += times.duration
        try:
            self._on_round(key, times)
        except Exception:
            log.exception("%s/%s: the times of a round were not recorded", *key)

    async def _round(self, key: Key) -> None:
        """Read all reports, publish the readings, and push plans to the workers that need them."""
        state = self._table.get(key)
        if state is None:
            return
        access = self._access(state)
        polls = await self._calls.read(key, self._follow(key), access)
        self._polls[key] = {poll.target.uid: poll for poll in polls}
        state = self._publish(key, polls)
        if state is None:
            return
        self._notify(key)
        if any(poll.is_unauthorized for poll in polls):
            self._on_unauthorized(key)
        await self._push(key, state, polls, access)

    async def _push_again(self, key: Key) -> None:
        """Push plans to the workers that need them after their last reports."""
        state = self._table.get(key)
        if state is not None:
            await self._push(key, state, tuple(self._polls[key].values()), self._access(state))

    def _has_reports(self, key: Key) -> bool:
        return any(poll.has_report for poll in self._polls.get(key, {}).values())

    def _follow(self, key: Key) -> list[WorkerPoll]:
        """Return the state of every pod that can be asked, and forget the pods that are gone."""
        known = self._polls.get(key, {})
        targets = [target for target in self._targets(key) if target.address is not None and not target.leaving]
        present = {target.uid for target in targets}
        for uid, poll in known.items():
            if uid not in present:
                self._forget(poll)
        return [
            known[target.uid].follow(target) if target.uid in known else WorkerPoll(target=target) for target in targets
        ]

    def _publish(self, key: Key, polls: Sequence[WorkerPoll]) -> DeploymentState | None:
        """Write the readings. Return the new state, or None if the deployment is gone."""
        state = self._table.get(key)
        if state is None:
            return None
        by_uid = {poll.target.uid: poll.reading for poll in polls if poll.reading is not None}
        readings = Readings(at=self._wall_clock(), round=state.readings.round + 1, by_uid=by_uid)
        return self._table.update(key, readings=readings)

    async def _push(self, key: Key, state: DeploymentState, polls: Sequence[WorkerPoll], access: WorkerAccess) -> None:
        """Push plans to workers whose last report shows that they need them."""
        published = state.published
        if published is None:
            return
        plans = plans_to_push(published, _running_plans(polls))
        if plans and not _is_paused(state):
            await self._calls.push(key, plans, access, limit=self._guard())


def _running_plans(polls: Sequence[WorkerPoll]) -> dict[str, RunningPlan]:
    """Return the running plans of workers with a valid report, by address."""
    return {
        poll.target.address: poll.running
        for poll in polls
        if poll.target.address is not None and poll.running is not None and poll.has_report
    }


def _is_paused(state: DeploymentState) -> bool:
    return bool(state.resource.value["spec"].get("paused"))
