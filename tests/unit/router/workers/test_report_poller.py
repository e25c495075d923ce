"""Reports of stand-in workers, and of one that does not answer."""

from __future__ import annotations

import asyncio
import time

from stand_in_worker import TOKEN, Script, StandInWorker, running

from specdecode_router.workers.client import WorkerClient
from specdecode_router.workers.registry import WorkerRegistry
from specdecode_router.workers.report_poller import ReportPoller
from specdecode_router.workers.worker import Endpoint


async def test_reports_of_live_workers_do_not_wait_for_dead_ones() -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with running(StandInWorker(Script(max_num_seqs=7, key="key-7"))) as worker:
        registry = WorkerRegistry(time.monotonic)
        registry.update([Endpoint("silent", f"http://127.0.0.1:{port}"), Endpoint("live", worker.url)])
        client = WorkerClient(lambda: TOKEN, connect_seconds=1)
        task = asyncio.create_task(ReportPoller(registry, client, 0.2).run())
        async with asyncio.timeout(5):
            while not registry.views()[-1].max_num_seqs or registry.counts().suspect < 1:
                await asyncio.sleep(0.01)
        live = registry.views()[-1]
        assert (live.max_num_seqs, live.compatibility_key, live.suspect) == (7, "key-7", False)
        task.cancel()
        await client.close()
    silent.close()
