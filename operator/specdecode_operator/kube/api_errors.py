"""Translation of the API server's error answers into ClusterError."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kubernetes.aio.client import ApiException

from specdecode_operator.errors import (
    ClusterError,
    Conflict,
    EvictionBlocked,
    Gone,
    NotFound,
    Refused,
    Unavailable,
)

_BY_STATUS: Mapping[int, type[ClusterError]] = {
    404: NotFound,
    409: Conflict,
    410: Gone,
    **dict.fromkeys((400, 403, 405, 413, 415, 422), Refused),
}
"""All other codes are Unavailable. This includes 500 and 503 of an admission webhook that cannot be called."""

BUDGET_CAUSE = "DisruptionBudget"


def translate(error: ApiException, request: str) -> ClusterError:
    """Return the ClusterError for an answer of the API server, with the server's own message.

    Args:
        error: Answer with a status other than 2xx.
        request: Method and path, which start the message.
    """
    status = _status_object(error)
    sentence = str(status.get("message") or f"{error.status} {error.reason}")
    budgets = [cause for cause in _causes(status) if cause.get("reason") == BUDGET_CAUSE]
    if error.status == 429 and budgets:
        sentence = " ".join([sentence, *(str(cause.get("message", "")) for cause in budgets)]).strip()
        return EvictionBlocked(f"{request}: {sentence}", sentence)
    return _BY_STATUS.get(error.status, Unavailable)(f"{request}: {sentence}", sentence)


def watch_error(status: Mapping[str, Any], request: str) -> ClusterError:
    """Return the ClusterError for an ERROR event of a watch, whose object is a Status."""
    error = Gone if status.get("code") == 410 else Unavailable
    return error(f"{request}: {status.get('message', status)}")


def _status_object(error: ApiException) -> Mapping[str, Any]:
    """Return the Status in the body, or an empty mapping: proxies and rate limits answer with plain text."""
    try:
        status = json.loads(error.body)
    except (TypeError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def _causes(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [cause for cause in (status.get("details") or {}).get("causes") or [] if isinstance(cause, dict)]
