"""Informational routes of the public port: probes, metrics, models, version and OpenAPI document."""

from __future__ import annotations

from functools import cache

import msgspec
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from specdecode_worker import metrics
from specdecode_worker.server.errors import without_paths
from specdecode_worker.server.openapi.document import document
from specdecode_worker.server.request_sampling import ModelLimits
from specdecode_worker.server.service import Service
from specdecode_worker.server.shared_call import SharedCall
from specdecode_worker.server.version import VERSION


def add_information(app: FastAPI, service: Service) -> None:
    """Add the routes for probes, metrics, models, version and OpenAPI document."""
    _add_probes(app, service)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": VERSION})

    @cache
    def encode_document(limits: ModelLimits | None) -> bytes:
        return msgspec.json.encode(document(service.config.model.served_name, limits))

    async def openapi_json() -> bytes:
        return encode_document(service.limits)

    # The document is cached. It is shared nevertheless, so that clients in a tight loop are slowed down.
    openapi_call = SharedCall(openapi_json)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(await openapi_call.result(), media_type="application/json")

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model_card(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model_name(name)
        return JSONResponse(_model_card(service))


def _add_probes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        lifecycle = service.lifecycle
        return PlainTextResponse(
            without_paths(lifecycle.failure) or "ok\n", status_code=200 if lifecycle.healthy else 503
        )

    @app.get("/ready")
    async def ready() -> Response:
        lifecycle = service.lifecycle
        return PlainTextResponse(f"{lifecycle.readiness}\n", status_code=200 if lifecycle.ready else 503)

    async def render_metrics() -> bytes:
        return metrics.render(await service.report(), service.counts)

    rendering = SharedCall(render_metrics)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(await rendering.result(), media_type=metrics.CONTENT_TYPE)


def _model_card(service: Service) -> dict[str, object]:
    name = service.config.model.served_name
    return {
        "id": name,
        "object": "model",
        "created": service.started_seconds,
        "owned_by": "specdecode",
        "max_model_len": service.model.loaded.max_model_len,
    }
