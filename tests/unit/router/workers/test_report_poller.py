"""Reports of stand-in workers, and of one that does not answer."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from specdecode_router.workers.client import WorkerClient
from specdecode_router.workers.registry import WorkerRegistry
from specdecode_router.workers.report_poller import ReportPoller
from specdecode_router.workers.worker import Endpoint, PlanTask
from specdecode_worker.contract import DraftState, PlanState, Report, StepCell, TaskMatch
from support.stand_in_worker import TOKEN, Script, StandInWorker, running


async def test_reports_of_live_workers_do_not_wait_for_dead_ones() -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with running(StandInWorker(Script(max_num_seqs=7, key="key-7"))) as worker:
        registry = WorkerRegistry(time.monotonic)
        registry.update([Endpoint("silent", f"http://127.0.0.1:{port}"), Endpoint("live", worker.url)])
        client = WorkerClient(lambda url: TOKEN, connect_seconds=1)
        task = asyncio.create_task(ReportPoller(registry, client, 0.2).run())
        async with asyncio.timeout(5):
            while not registry.views()[-1].max_num_seqs or registry.counts().suspect < 1:
                await asyncio.sleep(0.01)
        live = registry.views()[-1]
        assert (live.max_num_seqs, live.compatibility_key, live.suspect) == (7, "key-7", False)
        task.cancel()
        await client.close()
    silent.close()


async def test_a_report_gives_tasks_drafts_and_step_times() -> None:
    report = Report(
        boot_id="b",
        worker="w",
        clock_seconds=1,
        max_num_seqs=7,
        named_drafts=(DraftState(name="coder"), DraftState(name="broken", problem="no file")),
        plan=PlanState(
            tasks=(
                TaskMatch(name="code", match="```", draft="coder"),
                TaskMatch(name="sql", draft="broken"),
                TaskMatch(name="chat"),
            )
        ),
        steps=(step_cell(0.5),),
    )
    registry = WorkerRegistry(lambda: 100.0)
    registry.update([Endpoint("a", "http://a"), Endpoint("b", "http://b")])
    for name, one in (("a", report), ("b", report.model_copy(update={"steps": (step_cell(2.0),)}))):
        await ReportPoller(registry, cast(WorkerClient, Answer(one)), 1)._read(Endpoint(name, f"http://{name}"))
    a, b = registry.views()
    assert a.plan_tasks == (PlanTask("code", "```", "coder"), PlanTask("sql"), PlanTask("chat"))
    assert (a.speed, b.speed) == (1.0, 1.0), "workers are compared in intervals"
    registry._speeds._compared_at = 0.0
    await ReportPoller(registry, cast(WorkerClient, Answer(report)), 1)._read(Endpoint("a", "http://a"))
    a, b = registry.views()
    assert a.speed > 1 > b.speed


def step_cell(seconds: float) -> StepCell:
    return StepCell(tokens_bucket=8, draft_passes=0, prefill=False, context_bucket=0, count=200, x=(), xx=(), xt=(),
                    t=200 * seconds, tt=0, device_seconds=0, wall_seconds=0, clipped=0, emitted=0)  # fmt: skip


class Answer:
    """Client that has one report."""

    def __init__(self, report: Report) -> None:
        self._body = report.model_dump_json().encode()

    async def get(self, admin_url: str, path: str, seconds: float) -> tuple[int, bytes]:
        return 200, self._body
