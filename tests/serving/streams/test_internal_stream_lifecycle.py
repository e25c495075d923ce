"""Life of internal streams: full queues, signs of life, moves, hang-ups, and routers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from specdecode_worker.contract.internal_stream import (
    INTERNAL_STREAMS,
    ROUTER_HEADER,
    WORKER_LOAD,
    Alive,
    Error,
    Moved,
    WorkerLoad,
    decode_document,
    encode_document,
)
from specdecode_worker.engine.client import EngineChild
from specdecode_worker.engine.process import Heartbeat, Phase
from specdecode_worker.server.listening import GracefulShutdown
from specdecode_worker.server.service import Service
from support.faults import raw_clients
from support.internal_client import Journal, frames, opened
from support.worker import fake_engine
from support.worker_process import WorkerProcess, fake, ready, worker_config

SILENT = [fake_engine.SILENT, 1, 2]


@contextlib.asynccontextmanager
async def _running(admin: httpx.AsyncClient, service: Service, count: int = 1) -> AsyncIterator[list[Journal]]:
    """Yield the journals of streams that wait for a silent engine."""
    journals = [Journal(opened(prompt=SILENT, request_id=str(number))) for number in range(count)]
    tasks = [asyncio.create_task(journal.follow(admin)) for journal in journals]
    try:
        while service.engine.in_flight < count:
            await asyncio.sleep(0.01)
        yield journals
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_drain_moves_every_stream_at_once(
    admin: httpx.AsyncClient, service: Service, shutdown: GracefulShutdown
) -> None:
    async with _running(admin, service, 3) as journals:
        began = time.monotonic()
        assert await shutdown.begin() == 0
        assert time.monotonic() - began < 1
        await asyncio.sleep(0.05)
        assert [type(journal.last) for journal in journals] == [Moved] * 3
    assert not service.lifecycle.on_leave, "ended streams are not notified"
    late = await Journal(opened()).follow(admin)
    assert isinstance(late.last, Error)
    assert (late.last.status, late.last.retryable) == (503, True)


async def test_leaving_worker_takes_no_new_stream(admin: httpx.AsyncClient, service: Service) -> None:
    service.lifecycle.leave()
    late = await Journal(opened()).follow(admin)
    assert isinstance(late.last, Error)
    assert (late.last.status, late.last.retryable) == (503, True)


async def test_a_load_has_the_requests_by_tenant_and_the_routers_that_ask(
    admin: httpx.AsyncClient, service: Service
) -> None:
    async with _running(admin, service, 3):
        for router in ("router-b", "router-a"):
            answer = await admin.get(WORKER_LOAD, headers={ROUTER_HEADER: router})
        load = decode_document(WorkerLoad, answer.content)
        assert (load.clients, load.routers) == ({"": 3}, ("router-a", "router-b"))
        assert load.max_num_seqs == (await service.report()).max_num_seqs
        assert load.compatibility_key == service.compatibility_key


async def test_alive_frames_follow_the_heartbeat(
    admin: httpx.AsyncClient, service: Service, shutdown: GracefulShutdown
) -> None:
    async with _running(admin, service) as (beating,):
        await asyncio.sleep(0.8)
        await shutdown.begin()
        await asyncio.sleep(0.05)
    assert 3 <= beating.alive <= 6


async def test_stopped_engine_gives_no_sign_of_life(
    admin: httpx.AsyncClient, service: Service, shutdown: GracefulShutdown, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Heartbeat(Phase.STEP, 0.0, time.monotonic() - 0.6, 7, 1, 0, 0.1)
    monkeypatch.setattr(EngineChild, "heartbeat", property(lambda _: old))
    async with _running(admin, service) as (stopped,):
        await asyncio.sleep(0.6)
        await shutdown.begin()
        await asyncio.sleep(0.05)
    assert (stopped.alive, type(stopped.last)) == (0, Moved)


async def test_full_queue_is_retryable_and_says_when(admin: httpx.AsyncClient, service: Service) -> None:
    async with _running(admin, service, 8):
        refused = await Journal(opened()).follow(admin)
    assert isinstance(refused.last, Error)
    assert (refused.last.status, refused.last.retryable) == (429, True)
    assert dict(refused.last.headers)["Retry-After"] == "1"


@pytest.fixture
def worker(model_folder: Path, tmp_path: Path) -> Iterator[WorkerProcess]:
    with ready(fake(worker_config(model_folder), tmp_path / "log")) as started:
        yield started


def _admin_client(worker: WorkerProcess) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {worker.admin_token}"}
    return httpx.AsyncClient(base_url=worker.admin, headers=headers, timeout=10)


async def test_hang_up_cancels_the_request_at_once(worker: WorkerProcess) -> None:
    async with _admin_client(worker) as client:
        stream = frames(client, opened(prompt=SILENT))
        assert isinstance(await anext(stream), Alive), "frames arrive one by one"
        assert worker.report().running == 1
        await stream.aclose()
    worker.wait_until(lambda: worker.report().running == 0, 2)


def test_router_that_does_not_read_is_cut_off(model_folder: Path, tmp_path: Path) -> None:
    config = worker_config(model_folder, server={"write_timeout_seconds": 1, "grace_period_seconds": 30})
    request = opened(prompt="SAY:" + "x" * 200, max_tokens=200, logprobs=20, n=8, stream=True)
    with ready(fake(config, tmp_path / "log")) as worker:
        headers = f"Authorization: Bearer {worker.admin_token}\r\n"
        with raw_clients.deaf_client(worker.admin, INTERNAL_STREAMS, encode_document(request), headers):
            worker.wait_until(lambda: "does not read its answer" in worker.log)
            worker.wait_until(lambda: worker.report().running == 0, 2)
            worker.terminate()
            assert worker.exit_code(15) == 0, "its unread answers delay no drain"


async def test_sigterm_moves_streams_and_loses_none(worker: WorkerProcess) -> None:
    async with _admin_client(worker) as client:
        stream = frames(client, opened(prompt=SILENT))
        await anext(stream)
        worker.terminate()
        *_, last = [frame async for frame in stream]
    assert isinstance(last, Moved)
    assert worker.exit_code(5) == 0
