"""Internal routes of the admin port, for routers: streams, the load, and the public routes that generate no text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from fastapi import FastAPI, Request
from fastapi.responses import Response

from specdecode_worker.contract import Report, TaskMatch
from specdecode_worker.contract.internal_stream import (
    INTERNAL_STREAMS,
    MAX_FRAME_BYTES,
    ROUTER_HEADER,
    WORKER_LOAD,
    OpenStream,
    PlanTask,
    StepKindTime,
    WorkerLoad,
    decode_document,
    encode_document,
)
from specdecode_worker.server.errors import BadRequest
from specdecode_worker.server.internal_stream import FrameStream
from specdecode_worker.server.listening import read_body
from specdecode_worker.server.routes.public import information_app
from specdecode_worker.server.service import Service

ROUTER_SECONDS = 10.0
"""Time after its last question for which a router counts: five of its intervals."""
SETTLE_SECONDS = 2.0
"""Time from the first question to a new worker until all routers, which ask at once, are known."""
INTERNAL_PUBLIC = "/internal/v1/public"
"""Prefix of the public routes that generate no text."""


def add_internal(app: FastAPI, service: Service) -> None:
    """Add the internal routes."""

    @app.post(INTERNAL_STREAMS)
    async def streams(request: Request) -> Response:
        try:
            opened = decode_document(OpenStream, await read_body(request, MAX_FRAME_BYTES))
        except ValueError as error:
            raise BadRequest(str(error)) from None
        return FrameStream(service, opened)

    routers = RouterTable()

    @app.get(WORKER_LOAD)
    async def load(request: Request) -> Response:
        report = await service.report()
        routers.record(request.headers.get(ROUTER_HEADER, ""), time.monotonic())
        answer = load_of(report, service.plans.current.tasks, service.generations, routers)
        return Response(encode_document(answer), media_type="application/msgpack")

    app.mount(INTERNAL_PUBLIC, information_app(service))


class RouterTable:
    """Routers that ask this worker for its load. They share its places without knowing of each other otherwise."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._seen: dict[str, float] = {}
        self.settled = False
        """True once every router has had the time to ask."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the routers, in order."""
        return tuple(sorted(self._seen))

    def record(self, router: str, now: float) -> None:
        """Record a question at time ``now``, and forget routers that ask no more. A question may have no name."""
        if self._first is None:
            self._first = now
        self.settled = now - self._first >= SETTLE_SECONDS
        if router:
            self._seen[router] = now
        self._seen = {name: seen for name, seen in self._seen.items() if now - seen <= ROUTER_SECONDS}


def load_of(report: Report, tasks: Iterable[TaskMatch], clients: Mapping[str, int], routers: RouterTable) -> WorkerLoad:
    """Return what routers need of a report and of the plan's tasks.

    Routers gather the requests of tasks with a draft of their own. A task whose draft is not loaded uses the first one.
    """
    loaded: set[str | None] = {draft.name for draft in report.named_drafts if draft.problem is None}
    return WorkerLoad(
        routers=routers.names,
        settled=routers.settled,
        clients=dict(clients),
        max_num_seqs=report.max_num_seqs,
        draining=report.draining,
        compatibility_key=report.compatibility_key,
        model=report.model,
        tasks=tuple(
            PlanTask(task.name, task.match, (task.draft or "") if task.draft in loaded else "", task.clients)
            for task in tasks
        ),
        steps=tuple(
            StepKindTime(cell.tokens_bucket, cell.draft_passes, cell.prefill, cell.context_bucket, cell.count, cell.t)
            for cell in report.steps
        ),
    )
