"""Terms of one request besides its body: the client it is served for and its deadlines."""

from __future__ import annotations

import math
from dataclasses import dataclass

from starlette.datastructures import Headers

from specdecode_worker.contract import ServerConfig
from specdecode_worker.server.errors import BadRequest

TIMEOUT_HEADER = "X-Request-Timeout"


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """Client and deadlines of a request. Deadlines are times of the monotonic clock in seconds; 0 is none."""

    client: str = ""
    """Name of the API key; empty without keys."""
    weight: float = 1.0
    """Weight of the client's turns while requests wait."""
    deadline_seconds: float = 0.0
    queue_deadline_seconds: float = 0.0
    cache_salt: str = ""
    """Salt of the prefix cache that a router adds to the one of the body."""


def terms_of(client: str, headers: Headers, config: ServerConfig, now: float) -> RequestTerms:
    """Return the terms of a request of ``client`` that arrived at time ``now``.

    Raises:
        BadRequest: The header X-Request-Timeout is no positive number of seconds.
    """
    timeout = read_timeout(headers.get(TIMEOUT_HEADER), config.request_timeout_seconds)
    return RequestTerms(
        client=client,
        deadline_seconds=now + timeout,
        queue_deadline_seconds=now + config.queue_timeout_seconds,
    )


def read_timeout(header: str | None, default_seconds: float) -> float:
    """Return the time limit of a request in seconds: that of the header, but at most ``default_seconds``.

    Raises:
        BadRequest: The header is no positive number.
    """
    if header is None:
        return default_seconds
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadRequest(
            f"{TIMEOUT_HEADER} must be a positive number of seconds", param=TIMEOUT_HEADER, code="invalid_value"
        )
    return min(seconds, default_seconds)
