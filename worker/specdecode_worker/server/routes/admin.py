"""Routes of the admin port, which the operator calls with a token of the scope that admin_access.py asks for."""

from __future__ import annotations

import hashlib

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from specdecode_worker.contract import MAX_REPORT_BYTES, Header, Report, Route, SyntheticKnobs
from specdecode_worker.server.access.reloaded_secrets import ReloadedSecrets
from specdecode_worker.server.lifecycle import Shutdown
from specdecode_worker.server.plan_store import parse_plan
from specdecode_worker.server.requests.body_parser import parse_contract
from specdecode_worker.server.requests.draft_swap import NewDraft
from specdecode_worker.server.routes.admin_access import AdminAccessCheck
from specdecode_worker.server.routes.capture_deletions import add_capture_deletions
from specdecode_worker.server.routes.captures import add_captures
from specdecode_worker.server.routes.http_app import answer_errors, read_body
from specdecode_worker.server.routes.internal import add_internal
from specdecode_worker.server.service import Service


def admin_app(service: Service, shutdown: Shutdown, tokens: ReloadedSecrets) -> FastAPI:
    """Build the application of the admin port. A request needs one of ``tokens``."""
    app = FastAPI(title="specdecode admin", openapi_url=None)
    app.add_middleware(AdminAccessCheck, tokens=tokens)
    answer_errors(app)
    _add_plan(app, service)
    _add_draft(app, service)
    _add_synthetic(app, service)
    add_internal(app, service)
    add_capture_deletions(app, service)
    add_captures(app, service)

    @app.get(Route.report)
    async def report(request: Request) -> Response:
        return _report_or_not_modified(await service.report(), request.headers.get("If-None-Match"))

    @app.post(Route.drain)
    async def drain() -> Response:
        shutdown.begin()
        return JSONResponse({"state": service.lifecycle.state.name.lower()}, status_code=202)

    return app


def _add_plan(app: FastAPI, service: Service) -> None:
    @app.get(Route.plan)
    async def get_plan() -> Response:
        return _json(service.plans.current.model_dump_json().encode())

    @app.put(Route.plan)
    async def put_plan(request: Request) -> Response:
        plan = parse_plan(await read_body(request))
        await service.set_plan(plan)
        return _json(plan.model_dump_json().encode())


def _add_draft(app: FastAPI, service: Service) -> None:
    @app.get(Route.draft)
    async def get_draft() -> Response:
        return JSONResponse(await _drafts(service))

    @app.put(Route.draft)
    async def put_draft(request: Request) -> Response:
        new = parse_contract(NewDraft, await read_body(request))
        expected = await service.begin_draft_swap(new.config(), new.name, new.expected_hash)
        body = {**new.model_dump(exclude={"expected_hash"}), "hash": expected, "status": Route.draft}
        return JSONResponse(body, status_code=202, headers={"Location": Route.draft})


async def _drafts(service: Service) -> dict[str, object]:
    report = await service.report()
    return {
        "draft": report.draft.model_dump(),
        "named_drafts": [draft.model_dump() for draft in report.named_drafts],
    }


def _add_synthetic(app: FastAPI, service: Service) -> None:
    @app.get(Route.synthetic)
    async def get_synthetic() -> Response:
        knobs = (await service.report()).synthetic
        return _json(b"null" if knobs is None else knobs.model_dump_json().encode())

    @app.put(Route.synthetic)
    async def put_synthetic(request: Request) -> Response:
        knobs = parse_contract(SyntheticKnobs, await read_body(request))
        await service.set_synthetic(knobs)
        return _json(knobs.model_dump_json().encode())

    @app.delete(Route.synthetic)
    async def delete_synthetic() -> Response:
        await service.set_synthetic(None)
        return Response(status_code=204)


def _report_or_not_modified(report: Report, known: str | None) -> Response:
    """Return the report, or 304 with only the clock if the client already has this report.

    The entity tag covers the whole report except its clock.

    Args:
        report: The current report.
        known: Value of the header If-None-Match.
    """
    still = report.model_copy(update={"clock_seconds": 0.0}).model_dump_json().encode()
    tag = f'"{hashlib.sha256(still).hexdigest()[:16]}"'
    if tag == known:
        return Response(status_code=304, headers={"ETag": tag, Header.clock_seconds: repr(report.clock_seconds)})
    body = report.model_dump_json().encode()
    assert len(body) <= MAX_REPORT_BYTES, f"a report of {len(body)} bytes breaks the contract"
    return Response(body, media_type="application/json", headers={"ETag": tag})


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
