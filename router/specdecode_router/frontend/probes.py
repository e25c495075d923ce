"""Probes and metrics of the router itself."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from specdecode_router.frontend.state import RouterState


def add_probes(app: web.Application, state: RouterState) -> None:
    """Add the routes /health, /ready and /metrics."""

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(request: web.Request) -> web.Response:
        if state.lifecycle.ready:
            return web.Response(text="ready\n")
        return web.Response(text="draining\n", status=503)

    async def metrics(request: web.Request) -> web.Response:
        relay = state.relay
        counts = relay.workers.counts()
        relay.metrics.set_workers(ready=counts.ready, suspect=counts.suspect, terminating=counts.terminating)
        return web.Response(body=relay.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app.router.add_get("/metrics", metrics, allow_head=False)
    app.router.add_get("/health", health, allow_head=False)
    app.router.add_get("/ready", ready, allow_head=False)
