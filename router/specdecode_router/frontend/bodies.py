"""Bodies of requests, with the limits and errors of a worker."""

from __future__ import annotations

import asyncio

from aiohttp import web

from specdecode_router.errors import ApiError
from specdecode_worker.http_edge import BodyReservation

_DISCARD_FACTOR = 16
"""A client that is still sending cannot read the response, so up to this many times the limit is read and dropped."""


async def read_body(request: web.Request, reservation: BodyReservation, max_bytes: int, seconds: float) -> bytes:
    """Read the body of a request. Its bytes count in the budget of ``reservation`` until the caller releases them.

    Raises:
        ApiError: The body is too large or too slow, or the bodies of all clients exceed the budget.
    """
    try:
        async with asyncio.timeout(seconds):
            return await _read(request, reservation, max_bytes)
    except TimeoutError:
        raise ApiError(
            408,
            "the body did not arrive in time",
            kind="invalid_request_error",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None


async def _read(request: web.Request, reservation: BodyReservation, max_bytes: int) -> bytes:
    body, size = bytearray(), 0
    async for chunk in request.content.iter_any():
        size += len(chunk)
        if size <= max_bytes and reservation.grow(len(chunk)):
            body += chunk
        elif size > _DISCARD_FACTOR * max_bytes:
            break
        else:
            body.clear()
            reservation.release()
    if size > max_bytes:
        message = f"the body has more than {max_bytes} bytes"
        raise ApiError(413, message, kind="invalid_request_error", code="body_too_large")
    if reservation.exceeded:
        message = "too many request bodies are arriving at once; try again later"
        raise ApiError(503, message, code="too_many_bodies", headers={"Retry-After": "1"})
    return bytes(body)
