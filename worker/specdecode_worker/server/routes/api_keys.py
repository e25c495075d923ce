"""API key check of the public port. Probes and metrics need no key, as in vLLM."""

from __future__ import annotations

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specdecode_worker.server.access.reloaded_secrets import ReloadedSecrets
from specdecode_worker.server.access.secret_set import bearer_token
from specdecode_worker.server.errors import Unauthorized
from specdecode_worker.server.routes.http_app import error_response

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/openapi.json"})


class ApiKeyCheck:
    """ASGI middleware that answers 401 to a request without a valid API key, and sets ``request.state.client_name``.

    It runs before routing, so that a client without a key cannot tell which paths exist. It decides by the path that
    is routed; ``request.url`` would depend on the header ``Host``.
    """

    def __init__(self, app: ASGIApp, keys: ReloadedSecrets | None) -> None:
        """Wrap ``app``. Without ``keys`` every request is accepted, with an empty client name."""
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request of the ASGI server."""
        if scope["type"] == "http":
            scope.setdefault("state", {})["client_name"] = ""
            if self._keys is not None and scope["path"] not in OPEN_PATHS:
                token = bearer_token(Headers(scope=scope).get("Authorization", ""))
                names = self._keys.current.names_of(token) if token is not None else ()
                if not names:
                    error = Unauthorized(
                        "send a valid API key as 'Authorization: Bearer <key>'", code="invalid_api_key"
                    )
                    await error_response(error)(scope, receive, send)
                    return
                # A file may hold an old and a new key of one client; those after the first are named FILE/2 and so on.
                scope["state"]["client_name"] = names[0].partition("/")[0]
        await self._app(scope, receive, send)


def client_name(request: Request) -> str:
    """Return the name of the request's API key; empty if the worker has no keys."""
    return str(getattr(request.state, "client_name", ""))
