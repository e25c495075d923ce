"""Reports as they come over the network: garbage is refused by name, what is merely newer is not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fleet import SimulatedWorker, Truth

from specdecode_operator.errors import BadReport, WorkerError, WorkerUnreachable
from specdecode_operator.worker_client import Workers, read_report
from specdecode_worker.contract import CONTRACT_VERSION, MAX_REPORT_BYTES, Plan


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


async def test_silence_is_unreachable() -> None:
    with pytest.raises(WorkerUnreachable):
        await answering(httpx.ReadTimeout("2 s")).report("10.0.0.1", "secret")


async def test_a_refused_plan_says_what_the_worker_said() -> None:
    answer = httpx.Response(409, json={"error": {"message": "another uid"}})
    with pytest.raises(WorkerError, match="another uid"):
        await answering(answer).push("fd00::1", "secret", Plan())
