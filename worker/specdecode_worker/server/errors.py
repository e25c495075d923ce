"""What can go wrong between a client and the engine.

ServerError
├── TokenizerProblem      the model's folder has no usable tokenizer or chat template
├── TemplateRefused       the chat template does not accept these messages
├── CannotStart           a port is taken, the model is not there
└── ApiError              answered to the client as OpenAI's error object
    ├── BadRequest        400
    ├── Unauthorized      401
    ├── ModelNotFound     404
    ├── Conflict          409
    ├── BodyTooLarge      413
    ├── TooManyWaiting    429
    ├── EngineFailed      500
    └── Unavailable       503
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar


class ServerError(Exception):
    """Base of all errors of this package."""


class TokenizerProblem(ServerError):
    """The model's folder has no usable tokenizer or chat template."""


class TemplateRefused(ServerError):
    """The chat template does not accept these messages."""


class CannotStart(ServerError):
    """The server cannot come up; the message says what to change."""


class ApiError(ServerError):
    """An answer other than 200. ``param`` names the field at fault, ``code`` is for programs."""

    status: ClassVar[int]
    type: ClassVar[str]
    code: ClassVar[str | None] = None
    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.error_code = code or self.code

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.error_code}}


class BadRequest(ApiError):
    """The request itself is at fault; sending it again changes nothing."""

    status, type = 400, "invalid_request_error"


class Unauthorized(ApiError):
    """The admin port was called without its token, or the public one without an API key."""

    status, type, code = 401, "authentication_error", "invalid_token"
    headers: Mapping[str, str] = MappingProxyType({"WWW-Authenticate": "Bearer"})


class ModelNotFound(ApiError):
    """The request names a model that is not served here."""

    status, type, code = 404, "invalid_request_error", "model_not_found"


class Conflict(ApiError):
    """A plan or a draft that must not replace the one in use."""

    status, type, code = 409, "invalid_request_error", "conflict"


class BodyTooLarge(ApiError):
    """The body is longer than the server reads."""

    status, type, code = 413, "invalid_request_error", "body_too_large"


class TooManyWaiting(ApiError):
    """The waiting line is full."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.headers = {"Retry-After": str(retry_after_seconds)}


class EngineFailed(ApiError):
    """The engine gave up on the request."""

    status, type, code = 500, "server_error", "engine_error"


class Unavailable(ApiError):
    """Not ready yet, draining, or the engine is gone."""

    status, type, code = 503, "server_error", "unavailable"
    headers: Mapping[str, str] = MappingProxyType({"Retry-After": "1"})
