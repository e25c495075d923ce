"""Application of the router's port: all public routes of a worker, and the router's own probes."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from specdecode_router.frontend.connection_sweeper import ConnectionSweeper
from specdecode_router.frontend.error_responses import answer_errors, set_connection_headers
from specdecode_router.frontend.forwarding import add_forwarding
from specdecode_router.frontend.generation import add_generation
from specdecode_router.frontend.state import RouterState


def build_application(state: RouterState, sweeper: ConnectionSweeper) -> web.Application:
    """Return the application for a router."""
    app = web.Application(middlewares=[sweeper.note_request, answer_errors])
    app.on_response_prepare.append(set_connection_headers(state.lifecycle))
    add_generation(app, state)
    add_forwarding(app, state)
    _add_probes(app, state)
    return app


def _add_probes(app: web.Application, state: RouterState) -> None:
    """Add the routes /health, /ready and /metrics."""

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(request: web.Request) -> web.Response:
        if state.lifecycle.ready:
            return web.Response(text="ready\n")
        return web.Response(text="draining\n", status=503)

    async def metrics(request: web.Request) -> web.Response:
        made, queue = state.relay.metrics, state.admission
        made.set_workers(state.relay.workers.counts())
        made.set_queue(waiting=queue.waiting, held=queue.held, oldest_held_seconds=queue.oldest_held_seconds)
        return web.Response(body=made.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    for path, answer in (("/metrics", metrics), ("/health", health), ("/ready", ready)):
        app.router.add_get(path, answer, allow_head=False)
