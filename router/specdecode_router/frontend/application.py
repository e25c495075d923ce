"""Application of the router's port: all public routes of a worker, and the router's own probes."""

from __future__ import annotations

from aiohttp import web

from specdecode_router.frontend.connection_sweeper import ConnectionSweeper
from specdecode_router.frontend.error_responses import answer_errors, set_connection_headers
from specdecode_router.frontend.forwarding import add_forwarding
from specdecode_router.frontend.generation import add_generation
from specdecode_router.frontend.probes import add_probes
from specdecode_router.frontend.state import RouterState


def build_application(state: RouterState, sweeper: ConnectionSweeper) -> web.Application:
    """Return the application for a router."""
    app = web.Application(middlewares=[sweeper.note_request, answer_errors])
    app.on_response_prepare.append(set_connection_headers(state.lifecycle))
    add_generation(app, state)
    add_forwarding(app, state)
    add_probes(app, state)
    return app
