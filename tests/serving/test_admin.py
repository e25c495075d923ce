"""The admin port that the operator calls: report, plan, synthetic knobs and drain."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdecode_worker.contract import Header, Plan, Report, Route
from specdecode_worker.server.admission import RequestTerms
from specdecode_worker.server.generation import new_choices
from specdecode_worker.server.listening import GracefulShutdown
from specdecode_worker.server.prompts import Prompt
from specdecode_worker.server.requests import CompletionRequest
from specdecode_worker.server.service import Call, Service
from support.worker import fake_engine

PLAN: dict[str, Any] = {"uid": "uid-1", "draft": "d", "version": 4, "initial": "chain:2", "max_depth": 2}


async def test_report_combines_engine_counters_and_server_state(admin: httpx.AsyncClient, service: Service) -> None:
    report = Report.model_validate((await admin.get(Route.report)).json())
    assert (report.plan.version, report.draining) == (3, False)
    service.lifecycle.leave()
    assert Report.model_validate((await admin.get(Route.report)).json()).draining


async def test_unchanged_report_returns_304_with_the_clock(admin: httpx.AsyncClient, service: Service) -> None:
    first = await admin.get(Route.report)
    tag = first.headers["ETag"]
    again = await admin.get(Route.report, headers={"If-None-Match": tag})
    assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", tag)
    assert float(again.headers[Header.clock_seconds]) >= first.json()["clock_seconds"]
    service.lifecycle.leave()
    changed = await admin.get(Route.report, headers={"If-None-Match": tag})
    assert changed.status_code == 200
    assert changed.headers["ETag"] != tag


async def test_higher_plan_version_reaches_the_engine(admin: httpx.AsyncClient, service: Service) -> None:
    assert (await admin.put(Route.plan, json=PLAN)).status_code == 200
    assert (await service.report()).plan.version == 4
    assert Plan.model_validate((await admin.get(Route.plan)).json()).initial.depth == 2
    assert (await admin.put(Route.plan, json=PLAN)).status_code == 200, "the same again is no conflict"


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"uid": "uid-2"}, 409, "uid"),
        ({"version": 2}, 409, "version"),
        ({"version": 3}, 409, "version"),
        ({"max_depth": 99}, 400, "max_depth"),
        ({"initial": "chain:many"}, 400, "initial"),
        ({"rows": [{"concurrency": 0, "context": 0, "shape": [5]}]}, 400, "rows[0].shape"),
        ({"max_depth": 13}, 400, None),
    ],
)
async def test_conflicting_plan_is_refused_with_the_field(
    admin: httpx.AsyncClient, service: Service, change: dict[str, Any], status: int, param: str | None
) -> None:
    answer = await admin.put(Route.plan, json={**PLAN, **change})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert (await service.report()).plan.version == 3
    assert service.plans.current.version == 3


async def test_plan_version_may_restart_with_another_draft(admin: httpx.AsyncClient) -> None:
    assert (await admin.put(Route.plan, json={**PLAN, "draft": "e", "version": 1})).status_code == 200


async def test_knobs_are_set_shown_and_cleared(admin: httpx.AsyncClient) -> None:
    assert (await admin.get(Route.synthetic)).json() is None
    knobs = {"acceptance": [0.5], "step_time": [{"max_nodes": 3, "seconds": 0.01}]}
    assert (await admin.put(Route.synthetic, json=knobs)).status_code == 200
    assert (await admin.get(Route.synthetic)).json()["acceptance"] == [0.5]
    wrong = await admin.put(Route.synthetic, json={"acceptence": [0.5]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "acceptence")
    assert (await admin.delete(Route.synthetic)).status_code == 204
    assert (await admin.get(Route.synthetic)).json() is None


async def test_drain_refuses_new_requests_after_the_delay(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, shutdown: GracefulShutdown
) -> None:
    body = {"model": "small", "prompt": "hi", "max_tokens": 4}
    assert (await admin.post(Route.drain)).status_code == 202
    assert (await client.get("/ready")).status_code == 503
    served = await client.post("/v1/completions", json=body)
    assert (served.status_code, served.headers["connection"]) == (200, "close")
    assert await shutdown.begin() == 0
    refused = await client.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert (await client.get("/health")).status_code == 200


async def test_put_draft_is_accepted_before_the_swap(
    admin: httpx.AsyncClient, service: Service, tmp_path: Path
) -> None:
    body = {"uri": fake_engine.write_draft(tmp_path, "better"), "method": "eagle3", "quantization": "int4"}
    began = time.monotonic()
    accepted = await admin.put(Route.draft, json=body)
    assert time.monotonic() - began < fake_engine.LOAD_SECONDS
    assert (accepted.status_code, accepted.headers["Location"]) == (202, Route.draft)
    shown = (await admin.get(Route.draft)).json()["draft"]
    assert (shown["hash"], shown["pending"]["hash"]) == ("d", accepted.json()["hash"])
    assert shown["pending"]["since_seconds"] == pytest.approx(time.monotonic(), abs=5)
    served = 0
    while (await service.engine.report()).draft.pending is not None:
        prompt = Prompt([65])
        request = CompletionRequest(model="small", prompt=["A"], max_tokens=4)
        call = Call(body=b"", request_id="r", created=0, terms=RequestTerms())
        (generation,) = service.start(call, request, new_choices(service.model, request, [prompt]))
        await generation.whole()
        generation.close()
        generation.close()
        served += 1
    assert served > 1, "requests wait for the swap"
    assert service.counts.finished.total() == served, "a request counts once"
    assert service.generations == {}
    draft = (await service.report()).draft
    assert (draft.hash, draft.uri, draft.quantization) == (accepted.json()["hash"], body["uri"], "int4")
    assert (draft.pending, draft.swap_problem) == (None, None)


async def test_named_draft_is_swapped(admin: httpx.AsyncClient, service: Service) -> None:
    assert (await admin.put(Route.draft, json={"method": "ngram", "name": "code"})).status_code == 202
    while not (drafts := (await service.report()).named_drafts) or drafts[0].pending:
        await asyncio.sleep(0.01)
    assert [(draft.name, draft.method, draft.hash) for draft in drafts] == [("code", "ngram", "ngram-2-5")]
    assert (await service.report()).draft.hash == "d"


async def test_files_with_another_hash_are_refused(admin: httpx.AsyncClient, service: Service, tmp_path: Path) -> None:
    body = {"uri": fake_engine.write_draft(tmp_path, "good")}
    refused = await admin.put(Route.draft, json=body | {"expected_hash": "0123456789abcdef"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "expected_hash")
    assert (await service.report()).draft.pending is None
    known = (await admin.put(Route.draft, json=body)).json()["hash"]
    assert (await admin.put(Route.draft, json=body | {"expected_hash": known})).status_code == 202


@pytest.mark.parametrize(("name", "value"), [("block_port", 0), ("sampler", "mss")])
async def test_a_draft_that_would_be_refused_at_start_is_refused(
    admin: httpx.AsyncClient, service: Service, tmp_path: Path, name: str, value: object
) -> None:
    engine = service.config.engine.model_copy(update={name: value})
    service.config = service.config.model_copy(update={"engine": engine})
    body = {"uri": fake_engine.write_draft(tmp_path, "good"), "placement": "own"}
    refused = await admin.put(Route.draft, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "placement")
    assert "placement own" in refused.json()["error"]["message"]
    assert (await service.report()).draft.pending is None


async def test_a_draft_that_cannot_be_tried_is_refused_with_the_reason(
    admin: httpx.AsyncClient, service: Service
) -> None:
    absent = await admin.put(Route.draft, json={"uri": "file:///absent"})
    assert absent.status_code == 409
    assert "/absent holds no config.json" in absent.json()["error"]["message"]
    for body, param in (
        ({}, None),
        ({"method": "ngram", "uri": "file:///x"}, None),
        ({"method": "ngram", "quantization": "int4"}, None),
        ({"uri": "file:///x", "method": "magic"}, "method"),
        ({"uri": "file:///x", "depth": 3}, "depth"),
        ({"uri": "file:///x", "name": "No Name"}, "name"),
        ({"uri": "file:///x", "quantization": "int3"}, "quantization"),
    ):
        wrong = await admin.put(Route.draft, json=body)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param), wrong.text
    assert (await service.report()).draft.hash == "d"
