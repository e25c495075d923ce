"""Refusals of the admission queue: the errors that clients get instead of a place, and their reasons for the metric."""

from __future__ import annotations

from enum import StrEnum

from specdecode_router.errors import ApiError

NO_WORKER_RETRY_SECONDS = 10
"""Retry-After while no worker is there. Nothing is known of the time until one is: loading a model takes minutes."""


class RefusalReason(StrEnum):
    """Reason why a request got no place."""

    queue_full = "queue_full"
    tenant_full = "tenant_full"
    held_full = "held_full"
    hold_timeout = "hold_timeout"
    deadline = "deadline"


class Refused(ApiError):
    """Error of a request that got no place, in the terms that a worker uses for the same case."""

    reason: RefusalReason


def queue_is_full(waiting: int, retry_seconds: int) -> Refused:
    """Return the 429 of a full queue."""
    message = f"{waiting} requests are waiting, the limit of number or size; retry in {retry_seconds} s"
    return _refused(RefusalReason.queue_full, 429, message, retry_seconds)


def tenant_is_full(waiting: int, retry_seconds: int) -> Refused:
    """Return the 429 of a tenant that has its limit of waiting requests."""
    message = f"{waiting} requests of this API key are waiting, the limit of number or size; retry in {retry_seconds} s"
    return _refused(RefusalReason.tenant_full, 429, message, retry_seconds)


def held_is_full(held: int) -> Refused:
    """Return the 503 of a request that comes while no worker is there and the limit of held requests is reached."""
    message = f"no worker is ready, and {held} requests are waiting for one, the limit of number or size"
    return _refused(RefusalReason.held_full, 503, message, NO_WORKER_RETRY_SECONDS, "unavailable")


def hold_timed_out(seconds: float) -> Refused:
    """Return the 503 of a request that was held for the longest time."""
    message = f"no worker became ready within {seconds:g} s"
    return _refused(RefusalReason.hold_timeout, 503, message, NO_WORKER_RETRY_SECONDS, "unavailable")


def deadline_passed(seconds: float) -> Refused:
    """Return the 504 of a request whose deadline passed while it waited."""
    error = Refused(
        504,
        f"the request waited for a place until its deadline of {max(seconds, 0.0):g} s",
        code="deadline_exceeded",
        # OpenAI's clients repeat requests that end with 5xx. A repetition would take as long again.
        headers={"X-Should-Retry": "false"},
    )
    error.reason = RefusalReason.deadline
    return error


def _refused(reason: RefusalReason, status: int, message: str, retry_seconds: int, code: str = "") -> Refused:
    kind, code = ("server_error", code) if code else ("rate_limit_error", "rate_limit_exceeded")
    error = Refused(status, message, kind=kind, code=code, headers={"Retry-After": str(retry_seconds)})
    error.reason = reason
    return error
