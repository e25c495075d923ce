"""Errors of the router.

RouterError
├── CannotStart           a setting is wrong, or a port is taken
├── WorkerFailed          a worker closed the connection, sent no frame, or refused; another one may answer
└── ApiError              sent to the client as OpenAI's error object
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class RouterError(Exception):
    """Base class of all errors of this package."""


class CannotStart(RouterError):
    """Error that prevents the start of the router; the message says what to change."""


class WorkerFailed(RouterError):
    """Error of one attempt on one worker."""


class ApiError(RouterError):
    """Error response: OpenAI's error object with an HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "server_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Return the response body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
