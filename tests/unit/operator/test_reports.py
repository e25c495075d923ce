"""Reports as they come over the network: garbage is refused by name, what is merely newer is not."""

from __future__ import annotations

import json
from typing import Any, cast

import httpx
import pytest
from fleet import SimulatedWorker, Truth, deployment_with

from specdecode_operator.cluster import Cluster
from specdecode_operator.errors import BadReport, WorkerError, WorkerUnreachable
from specdecode_operator.memory import Baseline, Kept, LoadMemory, Memory
from specdecode_operator.memory_store import MemoryStore
from specdecode_operator.worker_client import Reading, Unchanged, Workers, read_report
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


def answering(answer: httpx.Response | Exception) -> Workers:
    def handle(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Workers(httpx.AsyncClient(transport=httpx.MockTransport(handle)))


async def test_a_report_that_never_ends_is_cut_off() -> None:
    with pytest.raises(BadReport, match=str(MAX_REPORT_BYTES)):
        await answering(httpx.Response(200, content=b"x" * (MAX_REPORT_BYTES * 20))).report("10.0.0.1", "secret")


def knowing(tag: str, body: bytes, **headers: str) -> Workers:
    """Workers whose report has that tag; who names it gets 304 with ``headers``."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.headers.get("If-None-Match") == tag:
            return httpx.Response(304, headers={name.replace("_", "-"): value for name, value in headers.items()})
        return httpx.Response(200, content=body, headers={"ETag": tag})

    return Workers(httpx.AsyncClient(transport=httpx.MockTransport(handle)))


async def test_a_report_that_is_known_is_not_sent_again(good: dict[str, Any]) -> None:
    workers = knowing('"t"', json.dumps(good).encode(), **{Header.clock_seconds: "77.5"})
    first = await workers.report("10.0.0.1", "secret")
    assert isinstance(first, Reading)
    assert first.tag == '"t"'
    assert isinstance(await workers.report("10.0.0.1", "secret", '"older"'), Reading)
    assert await workers.report("10.0.0.1", "secret", first.tag) == Unchanged(77.5)


@pytest.mark.parametrize("clock", ["", "soon", "nan", "-1", "inf"])
async def test_a_known_report_needs_a_clock(clock: str) -> None:
    with pytest.raises(BadReport, match=Header.clock_seconds):
        await knowing('"t"', b"", **{Header.clock_seconds: clock}).report("10.0.0.1", "secret", '"t"')


async def test_a_304_that_nobody_asked_for_is_no_report() -> None:
    with pytest.raises(BadReport):
        await answering(httpx.Response(304)).report("10.0.0.1", "secret")


def test_a_packed_reading_is_what_it_was_but_for_its_clock(good: dict[str, Any]) -> None:
    report = Report.model_validate(good)
    known = Baseline.of(report, '"t"')
    assert known.report == report
    assert known.at(99.0).report == report.model_copy(update={"clock_seconds": 99.0})
    assert len(known.packed) < len(report.model_dump_json()) / 2


class Written:
    """A cluster that only counts what is applied."""

    def __init__(self) -> None:
        self.states: list[dict[str, str]] = []

    async def apply(self, manifest: Any) -> None:
        self.states.append(dict(manifest["data"]))


async def test_memory_is_written_for_decisions_and_for_what_was_learnt_alone() -> None:
    cluster, deployment = Written(), deployment_with()
    store = MemoryStore(cast("Cluster", cluster))

    async def save(load: float, *, now: float, urgent: bool = False, learnt: bool = False) -> int:
        kept = Kept(uid="u1", load=LoadMemory(sequences=load))
        await store.save(deployment, Memory(kept=kept), urgent=urgent, learnt=learnt, now=now)
        return len(cluster.states)

    assert await save(1, now=0, urgent=True) == 1
    assert await save(2, now=100) == 1, "nothing was measured: what moved is the clock's doing"
    assert await save(3, now=30, learnt=True) == 1, "not twice a minute"
    assert await save(3, now=61) == 2, "what was learnt is written at rest, once"
    assert await save(4, now=200) == 2
    assert await save(4, now=201, urgent=True) == 3


async def test_silence_is_unreachable() -> None:
    with pytest.raises(WorkerUnreachable):
        await answering(httpx.ReadTimeout("2 s")).report("10.0.0.1", "secret")


async def test_a_refused_plan_says_what_the_worker_said() -> None:
    answer = httpx.Response(409, json={"error": {"message": "another uid"}})
    with pytest.raises(WorkerError, match="another uid"):
        await answering(answer).push("fd00::1", "secret", Plan())
