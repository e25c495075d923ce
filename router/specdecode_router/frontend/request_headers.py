"""Headers of a client's request, read as a worker reads them."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping

from specdecode_router.errors import ApiError
from specdecode_router.relay.request_ids import valid_request_id

TASK_HEADER = "X-Specdecode-Task"
CAPTURE_HEADER = "X-Specdecode-Capture"
TIMEOUT_HEADER = "X-Request-Timeout"
REQUEST_ID_HEADER = "X-Request-Id"


def request_id(headers: Mapping[str, str]) -> str:
    """Return the client's id of the request if it is valid in a header, else a new one."""
    sent = headers.get(REQUEST_ID_HEADER, "")
    return sent if valid_request_id(sent) else uuid.uuid4().hex


def timeout_seconds(headers: Mapping[str, str], limit_seconds: float) -> float:
    """Return the time limit of a request: that of its header, but at most ``limit_seconds``.

    Raises:
        ApiError: The header is no positive number.
    """
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return limit_seconds
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ApiError(
            400,
            f"{TIMEOUT_HEADER} must be a positive number of seconds",
            kind="invalid_request_error",
            code="invalid_value",
            param=TIMEOUT_HEADER,
        )
    return min(seconds, limit_seconds)
