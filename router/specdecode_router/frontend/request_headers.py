"""Headers of a client's request, read as a worker reads them.

The trace context goes to workers as it came: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Mapping

from aiohttp import web

from specdecode_router.errors import ApiError
from specdecode_router.relay.event_ids import is_valid_request_id

TASK_HEADER = "X-Specdecode-Task"
CAPTURE_HEADER = "X-Specdecode-Capture"
TIMEOUT_HEADER = "X-Request-Timeout"
REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID = web.RequestKey("request_id", str)
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")
_LENGTH_OF_VERSION_00 = 55
"""Only later versions may append fields."""
_MAX_TRACESTATE = 512
"""Characters of ``tracestate`` that the specification requires to be passed on."""
_PRINTABLE = re.compile(r"[ -~\t]*")


def request_id(request: web.Request) -> str:
    """Return the id of the request: the client's if it is valid in a header, else a new one, the same at every call."""
    sent = request.headers.get(REQUEST_ID_HEADER, "")
    return str(request.setdefault(REQUEST_ID, sent if is_valid_request_id(sent) else uuid.uuid4().hex))


def text_of(headers: Mapping[str, str], name: str) -> str | None:
    """Return a header; None without it. Bytes that are no UTF-8 are surrogates there, which no encoder takes."""
    value = headers.get(name)
    return None if value is None else value.encode(errors="replace").decode()


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


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the trace context of the client's headers; empty if it has none or an invalid one.

    Args:
        headers: Headers with names in lower case, or a mapping that ignores case.
    """
    parent = headers.get("traceparent", "").strip()
    if not _TRACEPARENT.fullmatch(parent) or (parent.startswith("00") and len(parent) != _LENGTH_OF_VERSION_00):
        return {}
    state = headers.get("tracestate", "").strip()
    usable = state and len(state) <= _MAX_TRACESTATE and _PRINTABLE.fullmatch(state)
    return {"traceparent": parent, **({"tracestate": state} if usable else {})}
