"""Loads of stand-in workers, and of one that does not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import cast

from specdecode_router.workers.client import WorkerClient
from specdecode_router.workers.load_poller import LoadPoller
from specdecode_router.workers.registry import WorkerRegistry
from specdecode_router.workers.worker import Endpoint
from specdecode_worker.contract.internal_stream import PlanTask, StepKindTime, WorkerLoad, encode_document
from support.stand_in_worker import TOKEN, Script, StandInWorker, running
from support.waiting import eventually


async def test_loads_of_live_workers_do_not_wait_for_dead_ones() -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with running(StandInWorker(Script(max_num_seqs=7, key="key-7"))) as worker:
        registry = WorkerRegistry(time.monotonic)
        registry.update([Endpoint("silent", f"http://127.0.0.1:{port}"), Endpoint("live", worker.url)])
        client = WorkerClient(lambda url: (TOKEN,), connect_seconds=1)
        task = asyncio.create_task(LoadPoller(registry, client, 0.2, "r1", lambda: False).run())
        await eventually(lambda: registry.views()[-1].max_num_seqs and registry.counts()["suspect"] == 1)
        live = registry.views()[-1]
        assert (live.max_num_seqs, live.compatibility_key, live.suspect) == (7, "key-7", False)
        task.cancel()
        await client.close()
    silent.close()


async def test_a_load_gives_tasks_drafts_and_step_times() -> None:
    registry = WorkerRegistry(lambda: 100.0)
    registry.update([Endpoint("a", "http://a"), Endpoint("b", "http://b")])
    for name, seconds in (("a", 0.5), ("b", 2.0)):
        await poller_of(registry, seconds)._read(Endpoint(name, f"http://{name}"))
    a, b = registry.views()
    assert a.plan_tasks == (PlanTask("code", "```", "coder"),)
    assert (a.speed, b.speed) == (1.0, 1.0), "workers are compared in intervals"
    registry._speeds._compared_at = 0.0
    await poller_of(registry, 0.5)._read(Endpoint("a", "http://a"))
    a, b = registry.views()
    assert a.speed > 1 > b.speed


async def test_loads_are_read_fast_while_requests_wait_and_rows_are_free() -> None:
    registry, waits = WorkerRegistry(lambda: 100.0), [True]
    registry.update([Endpoint("a", "http://a")])
    poller = poller_of(registry, 1.0, waits)
    for now, due in ((0.0, True), (0.25, True), (0.5, False), (2.3, True), (2.6, False)):
        waits[0] = now < 0.5
        poller.poll(now)
        assert bool(poller._reading) == due, now
        await asyncio.gather(*poller._reading.values())


def poller_of(registry: WorkerRegistry, seconds: float, waits: list[bool] | None = None) -> LoadPoller:
    """Return a poller of workers that have one kind of steps, of ``seconds`` each."""
    load = WorkerLoad(
        routers=("r1",),
        settled=True,
        clients={},
        max_num_seqs=7,
        draining=False,
        compatibility_key="",
        model="",
        tasks=(PlanTask("code", "```", "coder"),),
        steps=(StepKindTime(8, 0, False, 0, 200, 200 * seconds),),
    )
    return LoadPoller(registry, cast(WorkerClient, Answer(load)), 2, "r1", lambda: waits is not None and waits[0])


class Answer:
    """Client that has one load."""

    def __init__(self, load: WorkerLoad) -> None:
        self._body = encode_document(load)

    async def get(self, admin_url: str, path: str, seconds: float, headers: Mapping[str, str]) -> tuple[int, bytes]:
        assert headers == {"X-Specdecode-Router": "r1"}
        return 200, self._body
