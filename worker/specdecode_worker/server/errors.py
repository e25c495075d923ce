"""Errors of the server package, and their HTTP status codes.

ServerError
├── CannotStart           a port is taken, the model is missing, ...
└── ApiError              sent to the client as OpenAI's error object
    ├── BadRequest        400
    ├── Unauthorized      401
    ├── Forbidden         403
    ├── ModelNotFound     404
    ├── Conflict          409
    │   └── Incompatible  409
    ├── BodyTooLarge      413
    ├── RetryLater
    │   ├── TooManyWaiting  429
    │   ├── Unavailable     503
    │   └── QueueTimedOut   503
    ├── EngineFailed      500
    │   └── EngineLost    500
    ├── NotBuilt          501
    └── DeadlineExceeded  504
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

_FILE_PATH = re.compile(r"(?<![\w.)])(?:[a-z][a-z0-9+]*:/)?/[^\s'\"<>,;()\[\]]+")


def without_paths(text: str) -> str:
    """Return ``text`` with every absolute path and file URI replaced, for clients that must not learn them."""
    return _FILE_PATH.sub("[path]", text)


class ServerError(Exception):
    """Base class of all errors of this package."""


class CannotStart(ServerError):
    """Error that prevents the start of the server; the message says what to change."""


class ApiError(ServerError):
    """Error response of the API. ``param`` names the field at fault; ``code`` identifies the error for programs."""

    status: ClassVar[int]
    type: ClassVar[str]
    code: ClassVar[str | None] = None
    headers: Mapping[str, str] = MappingProxyType({})
    retryable: ClassVar[bool] = False
    """True if another worker may answer the same request."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.error_code = code or self.code

    def body(self) -> dict[str, Any]:
        """Return the response body: OpenAI's error object. Errors of the server name no paths of its file system."""
        message = without_paths(self.message) if self.status >= 500 else self.message
        return error_object(message, self.type, self.param, self.error_code)


def error_object(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class BadRequest(ApiError):
    """Response 400: the request is invalid, and a retry gives the same result."""

    status, type = 400, "invalid_request_error"


def invalid_value(message: str, param: str) -> BadRequest:
    """Return the error for a field whose value cannot be used."""
    return BadRequest(message, param=param, code="invalid_value")


def unsupported(message: str, param: str) -> BadRequest:
    """Return the error for an unsupported field or value."""
    return BadRequest(message, param=param, code="unsupported_parameter")


class Unauthorized(ApiError):
    """Response 401: the admin port was called without its token, or the public port without a valid API key."""

    status, type, code = 401, "authentication_error", "invalid_token"
    headers: Mapping[str, str] = MappingProxyType({"WWW-Authenticate": "Bearer"})


class Forbidden(ApiError):
    """Response 403: the admin port was called with a token that lacks the scope."""

    status, type, code = 403, "permission_error", "insufficient_scope"


class ModelNotFound(ApiError):
    """Response 404: the request names a model that this worker does not serve."""

    status, type, code = 404, "invalid_request_error", "model_not_found"


class Conflict(ApiError):
    """Response 409: a plan or a draft must not replace the current one."""

    status, type, code = 409, "invalid_request_error", "conflict"


class Incompatible(Conflict):
    """Response 409: this worker would continue the text of a request with another one."""

    code = "incompatible_worker"
    retryable = True


class BodyTooLarge(ApiError):
    """Response 413: the request body exceeds the size limit."""

    status, type, code = 413, "invalid_request_error", "body_too_large"


class RetryLater(ApiError):
    """Response to a request that another worker, or a later attempt, may answer. Retry-After has the expected wait."""

    retryable = True

    def __init__(self, message: str, *, code: str | None = None, retry_after_seconds: int = 1) -> None:
        super().__init__(message, code=code)
        self.headers = {"Retry-After": str(retry_after_seconds)}


class TooManyWaiting(RetryLater):
    """Response 429: the queue is full."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"


class EngineFailed(ApiError):
    """Response 500: the engine ended the request with an error."""

    status, type, code = 500, "server_error", "engine_error"


class EngineLost(EngineFailed):
    """Response 500: the engine process ended before the request did."""

    retryable = True


class NotBuilt(ApiError):
    """Response 501: this server does not have a route of OpenAI's API."""

    status, type, code = 501, "invalid_request_error", "not_implemented"
    headers: Mapping[str, str] = MappingProxyType({"X-Should-Retry": "false"})


class Unavailable(RetryLater):
    """Response 503: this worker cannot serve the request now; the code says why."""

    status, type, code = 503, "server_error", "unavailable"


class QueueTimedOut(RetryLater):
    """Response 503: the request waited for the longest time in the queue. Another worker may have a place."""

    status, type, code = 503, "server_error", "queue_timeout"


class DeadlineExceeded(ApiError):
    """Response 504: the request was cancelled at its deadline.

    OpenAI's clients repeat requests that end with 408 or 5xx, unless X-Should-Retry says otherwise. A repetition would
    take as long again.
    """

    status, type, code = 504, "server_error", "deadline_exceeded"
    headers: Mapping[str, str] = MappingProxyType({"X-Should-Retry": "false"})
