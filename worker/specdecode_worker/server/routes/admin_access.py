"""Access check of the admin port: no foreign web page, a valid token, and a token with the scope of the route."""

from __future__ import annotations

import logging
import os
import socket

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from specdecode_worker.contract import Env
from specdecode_worker.server.access.reloaded_secrets import ReloadedSecrets
from specdecode_worker.server.access.request_origin import is_own_host, is_own_origin
from specdecode_worker.server.access.scopes import allowed_scopes, scope_of
from specdecode_worker.server.access.secret_set import bearer_token
from specdecode_worker.server.errors import ApiError, Forbidden, Unauthorized
from specdecode_worker.server.routes.http_app import error_response

log = logging.getLogger(__name__)


class AdminAccessCheck:
    """ASGI middleware that answers 401 or 403 to a request that may not call its route of the admin port.

    It runs before routing, so that a client without a token cannot tell which paths exist.
    """

    def __init__(self, app: ASGIApp, tokens: ReloadedSecrets) -> None:
        self._app, self._tokens = app, tokens
        self._own_names = {name.lower() for name in (os.environ.get(Env.pod_name), socket.gethostname()) if name}

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Handle one request of the ASGI server."""
        if scope["type"] == "http":
            try:
                self._check(scope["method"], scope["path"], Headers(scope=scope))
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        """Raise Unauthorized or Forbidden for a request that may not call its route."""
        host = headers.get("Host", "")
        if len(headers.getlist("Host")) > 1 or not is_own_host(host, self._own_names):
            raise Forbidden(
                "call the admin port by an IP address, localhost or the pod's name, not by another name",
                code="foreign_host",
            )
        if any(not is_own_origin(origin, host) for origin in headers.getlist("Origin")):
            raise Forbidden("the admin port takes no requests of other web pages", code="foreign_origin")
        token = bearer_token(headers.get("Authorization", ""))
        scopes = {scope_of(name) for name in self._tokens.current.names_of(token)} if token is not None else set()
        if not scopes:
            raise Unauthorized(
                "the admin port needs 'Authorization: Bearer <token>'; the worker's log names the file of a token that "
                "was made at start"
            )
        allowed = allowed_scopes(method, path)
        if not scopes & allowed:
            needed, had = " or ".join(sorted(allowed)), " and ".join(sorted(scopes))
            log.warning("refused %s %.200r: the token has the scope %s, the route needs %s", method, path, had, needed)
            raise Forbidden(f"this route needs a token with the scope {needed}; this token has {had}")
