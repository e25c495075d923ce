"""Polling of the workers' reports: load, capacity, draining and compatibility key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec

from specdecode_router.workers.client import WorkerClient
from specdecode_router.workers.registry import WorkerRegistry
from specdecode_router.workers.step_speeds import StepKind, StepSums
from specdecode_router.workers.worker import Endpoint, PlanTask
from specdecode_worker.contract import Route

log = logging.getLogger(__name__)

_FIRST_SECONDS = 0.2
"""Interval until every worker has answered once."""


class _Draft(msgspec.Struct):
    name: str = ""
    problem: str | None = None


class _Task(msgspec.Struct):
    name: str
    match: str | None = None
    draft: str | None = None


class _Plan(msgspec.Struct, frozen=True):
    tasks: tuple[_Task, ...] = ()


class _Steps(msgspec.Struct):
    tokens_bucket: int
    draft_passes: int
    prefill: bool
    context_bucket: int
    count: int
    t: float


class _Report(msgspec.Struct):
    """Fields of a report that the router reads. The others are skipped without being built."""

    running: int = 0
    waiting: int = 0
    max_num_seqs: int = 1
    draining: bool = False
    compatibility_key: str | None = None
    model: str = ""
    named_drafts: tuple[_Draft, ...] = ()
    plan: _Plan = _Plan()
    steps: tuple[_Steps, ...] = ()


class ReportPoller:
    """Reads the reports of all workers every few seconds, all at once and each within a deadline."""

    def __init__(
        self,
        registry: WorkerRegistry,
        client: WorkerClient,
        seconds: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._registry, self._client, self._seconds, self._sleep = registry, client, seconds, sleep
        self._decoder = msgspec.json.Decoder(_Report)
        self._answered: set[str] = set()
        self._reading: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Poll until cancelled."""
        try:
            while True:
                self.poll()
                names = {one.name for one in self._registry.endpoints}
                await self._sleep(self._seconds if names and names <= self._answered else _FIRST_SECONDS)
        finally:
            for task in self._reading.values():
                task.cancel()

    def poll(self) -> None:
        """Begin to read every report that is not being read already."""
        self._reading = {name: task for name, task in self._reading.items() if not task.done()}
        for endpoint in self._registry.endpoints:
            if endpoint.name not in self._reading:
                self._reading[endpoint.name] = asyncio.create_task(self._read(endpoint))

    async def _read(self, endpoint: Endpoint) -> None:
        name = endpoint.name
        try:
            status, body = await self._client.get(endpoint.admin_url, Route.report, self._seconds)
            if status != 200:
                raise ValueError(f"status {status}")
            report = self._decoder.decode(body)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
            if name in self._answered:
                log.warning("worker %s: no report: %s", name, str(error) or type(error).__name__)
            self._answered.discard(name)
            self._registry.record_failure(name)
            return
        self._answered.add(name)
        self._registry.record_report(
            name,
            requests=report.running + report.waiting,
            max_num_seqs=report.max_num_seqs,
            draining=report.draining,
            compatibility_key=report.compatibility_key,
            model=report.model,
            plan_tasks=_plan_tasks(report),
            steps=_step_sums(report),
        )


def _plan_tasks(report: _Report) -> tuple[PlanTask, ...]:
    """Return the tasks of the plan. A task whose draft is not loaded uses the first draft, as at the worker."""
    loaded = {draft.name for draft in report.named_drafts if draft.problem is None}
    return tuple(
        PlanTask(task.name, task.match, task.draft if task.draft and task.draft in loaded else "")
        for task in report.plan.tasks
    )


def _step_sums(report: _Report) -> dict[StepKind, StepSums]:
    """Return number and seconds of the steps by kind."""
    return {
        (one.tokens_bucket, one.draft_passes, one.prefill, one.context_bucket): StepSums(one.count, one.t)
        for one in report.steps
    }
