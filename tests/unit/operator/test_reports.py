"""Reports as they come over the network: garbage is refused by name, what is merely newer is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import pytest
from aiohttp import web
from fleet import SimulatedWorker, Truth, deployment_with

from specdecode_operator.errors import BadReport, WorkerError, WorkerUnreachable
from specdecode_operator.kube.applied import Applied, ApplyCache
from specdecode_operator.kube.client import Kind, KubeClient
from specdecode_operator.state.learned import LearnedState, LoadState
from specdecode_operator.state.session import Baseline, Session
from specdecode_operator.state.store import StateStore
from specdecode_operator.telemetry.worker_client import Reading, Unchanged, WorkerClient, read_report
from specdecode_worker.contract import CONTRACT_VERSION, MAX_REPORT_BYTES, Header, Plan, Report


@pytest.fixture
def good() -> dict[str, Any]:
    worker = SimulatedWorker(Truth(), plan=Plan(max_depth=5))
    worker.run(2)
    found: dict[str, Any] = json.loads(worker.report().model_dump_json())
    return found


def read(document: Any) -> None:
    read_report(json.dumps(document).encode())


def test_a_good_report_reads(good: dict[str, Any]) -> None:
    read(good)


def test_what_is_unknown_comes_from_a_newer_worker(good: dict[str, Any]) -> None:
    read({**good, "contract_version": CONTRACT_VERSION + 1, "weather": "fine", "draft": {**good["draft"], "mood": 1}})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"drafts": -1}, "drafts"),
        ({"drafts": "many"}, "drafts"),
        ({"drafts": 10**400}, "drafts"),
        ({"clock_seconds": None}, "clock_seconds"),
        ({"boot_id": 7}, "boot_id"),
        ({"running_request_seconds": 1e999}, "running_request_seconds"),
        ({"contract_version": CONTRACT_VERSION + 2}, "contract_version"),
        ({"acceptance": [{"draft": "d"}]}, r"acceptance\.0\.task"),
        ({"latency": [{"name": "ttft", "edges": [1], "counts": [1], "sum": 1}]}, r"latency\.0"),
        ({"steps": "none"}, "steps"),
    ],
)
def test_garbage_is_refused_by_name(good: dict[str, Any], change: dict[str, Any], name: str) -> None:
    with pytest.raises(BadReport, match=name):
        read({**good, **change})


def test_moments_of_another_length_are_refused(good: dict[str, Any]) -> None:
    good["steps"][0]["x"].append(1.0)
    with pytest.raises(BadReport, match=r"steps\.0"):
        read(good)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"null", b'"report"'])
def test_what_is_no_report_at_all(body: bytes) -> None:
    with pytest.raises(BadReport):
        read_report(body)


@asynccontextmanager
async def serving(
    handle: Callable[[web.BaseRequest], Awaitable[web.Response]], *, timeout_seconds: float = 60
) -> AsyncIterator[WorkerClient]:
    """A client of workers that answer by ``handle``, whatever their address; patient, since machines of tests stall."""
    runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    workers = WorkerClient(proxy=f"http://{host}:{port}", timeout_seconds=timeout_seconds)
    try:
        yield workers
    finally:
        await workers.close()
        await runner.cleanup()


def answering(status: int, body: bytes = b"", **headers: str) -> AbstractAsyncContextManager[WorkerClient]:
    async def handle(request: web.BaseRequest) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        return web.Response(status=status, body=body, headers=headers)

    return serving(handle)


async def test_a_report_that_never_ends_is_cut_off() -> None:
    async with answering(200, b"x" * (MAX_REPORT_BYTES * 20)) as workers:
        with pytest.raises(BadReport, match=str(MAX_REPORT_BYTES)):
            await workers.report("10.0.0.1", "secret")


async def test_nobody_is_sent_elsewhere_with_the_token() -> None:
    async with answering(307, Location="http://10.0.0.2:1/v1/report") as workers:
        with pytest.raises(WorkerError, match="answered 307"):
            await workers.report("10.0.0.1", "secret")


def knowing(tag: str, body: bytes, **headers: str) -> AbstractAsyncContextManager[WorkerClient]:
    """Workers whose report has that tag; who names it gets 304 with ``headers``."""

    async def handle(request: web.BaseRequest) -> web.Response:
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers={name.replace("_", "-"): value for name, value in headers.items()})
        return web.Response(body=body, headers={"ETag": tag})

    return serving(handle)


async def test_a_report_that_is_known_is_not_sent_again(good: dict[str, Any]) -> None:
    async with knowing('"t"', json.dumps(good).encode(), **{Header.clock_seconds: "77.5"}) as workers:
        first = await workers.report("10.0.0.1", "secret")
        assert isinstance(first, Reading)
        assert first.tag == '"t"'
        assert isinstance(await workers.report("10.0.0.1", "secret", '"older"'), Reading)
        assert await workers.report("10.0.0.1", "secret", first.tag) == Unchanged(77.5)


@pytest.mark.parametrize("clock", ["", "soon", "nan", "-1", "inf"])
async def test_a_known_report_needs_a_clock(clock: str) -> None:
    async with knowing('"t"', b"", **{Header.clock_seconds: clock}) as workers:
        with pytest.raises(BadReport, match=Header.clock_seconds):
            await workers.report("10.0.0.1", "secret", '"t"')


async def test_a_304_that_nobody_asked_for_is_no_report() -> None:
    async with answering(304) as workers:
        with pytest.raises(BadReport):
            await workers.report("10.0.0.1", "secret")


def test_a_packed_reading_is_what_it_was_but_for_its_clock(good: dict[str, Any]) -> None:
    report = Report.model_validate(good)
    known = Baseline.of(report, '"t"')
    assert known.report == report
    assert known.at(99.0).report == report.model_copy(update={"clock_seconds": 99.0})
    assert len(known.packed) < len(report.model_dump_json()) / 2


class Written:
    """A cluster that only counts what is applied, and gives the last of it back."""

    def __init__(self) -> None:
        self.states: list[dict[str, str]] = []
        self.applied = ApplyCache()

    async def apply(self, manifest: Any) -> None:
        self.states.append(dict(manifest["data"]))

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        return {"data": self.states[-1]}


async def test_memory_is_written_for_decisions_and_for_what_was_learnt_alone() -> None:
    cluster, deployment = Written(), deployment_with()
    store = StateStore(cast("KubeClient", cluster))

    async def save(load: float, *, now: float, urgent: bool = False, learnt: bool = False) -> int:
        learned = LearnedState(uid="u1", load=LoadState(sequences=load))
        await store.save(deployment, Session(learned=learned), urgent=urgent, learnt=learnt, now=now)
        return len(cluster.states)

    assert await save(1, now=0, urgent=True) == 1
    assert await save(2, now=100) == 1, "nothing was measured: what moved is the clock's doing"
    assert await save(3, now=30, learnt=True) == 1, "not twice a minute"
    assert await save(3, now=61) == 2, "what was learnt is written at rest, once"
    assert await save(4, now=200) == 2
    assert await save(4, now=201, urgent=True) == 3


async def test_a_restart_knows_what_was_written_and_what_was_applied() -> None:
    cluster, deployment = Written(), deployment_with()
    child = ("Service", deployment.namespace, deployment.name)
    cluster.applied[child] = Applied("text", "ours", 5.0)
    memory = Session(learned=LearnedState(uid=deployment.uid, load=LoadState(sequences=1)))
    await StateStore(cast("KubeClient", cluster)).save(deployment, memory, urgent=True, now=0)
    cluster.applied = ApplyCache()
    restarted = StateStore(cast("KubeClient", cluster))
    found = await restarted.load(deployment)
    recalled = cluster.applied.get(child)
    assert recalled is not None
    assert (recalled.text, recalled.ours) == ("text", "ours")
    await restarted.save(deployment, found, urgent=True, now=1)
    assert len(cluster.states) == 1, "it stands there already"


@pytest.mark.parametrize("told", ["", "7", "[]", '{"Service": "a b"}', '{"Service/x": 3}', '{"Service/x": "a"}'])
async def test_garbage_of_what_was_applied_is_nothing_applied(told: str) -> None:
    cluster, deployment = Written(), deployment_with()
    memory = Session(learned=LearnedState(uid=deployment.uid))
    await StateStore(cast("KubeClient", cluster)).save(deployment, memory, urgent=True, now=0)
    cluster.states[-1]["applied.json"] = told
    assert (await StateStore(cast("KubeClient", cluster)).load(deployment)).found
    assert cluster.applied.told(deployment.namespace, ["x"]) == {}


async def test_silence_is_unreachable() -> None:
    async def handle(request: web.BaseRequest) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async with serving(handle, timeout_seconds=0.3) as workers:
        with pytest.raises(WorkerUnreachable):
            await workers.report("10.0.0.1", "secret")


async def test_who_is_gone_is_unreachable() -> None:
    workers = WorkerClient()
    with pytest.raises(WorkerUnreachable):
        await workers.report("127.0.0.1", "secret")
    await workers.close()


async def test_a_refused_plan_says_what_the_worker_said() -> None:
    async with answering(409, json.dumps({"error": {"message": "another uid"}}).encode()) as workers:
        with pytest.raises(WorkerError, match="another uid"):
            await workers.push("fd00::1", "secret", Plan())
