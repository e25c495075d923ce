"""History of the attempts of one request: which workers to leave out, and when to give up."""

from __future__ import annotations

import json

from specdecode_router.errors import ApiError
from specdecode_router.relay.client_stream import RefusedByWorker
from specdecode_worker.contract.internal_stream import Error

_EXCLUDE_SECONDS = 2.0
"""Time for which a worker that failed or refused a request does not get it again. It may have restarted by then."""
_CRASH_CODE = "engine_error"
"""Code of the retryable error by which a worker reports that its engine ended while it served the request."""
_INCOMPATIBLE_CODE = "incompatible_worker"
"""Code of the retryable error by which a worker refuses to continue a text that it would change."""


class AttemptHistory:
    """Failures, refusals and moves of one request."""

    __slots__ = ("_excluded", "_excluded_until", "_last_refusal", "_max_crashes", "_max_refusals", "_refusals",
                 "crashes")  # fmt: skip

    def __init__(self, max_refusals: int, max_crashes: int) -> None:
        self._max_refusals, self._max_crashes = max_refusals, max_crashes
        self.crashes = 0
        """Workers that failed while they served the request."""
        self._refusals = 0
        self._last_refusal: Error | None = None
        self._excluded: set[str] = set()
        self._excluded_until: dict[str, float] = {}

    def exclude(self, name: str) -> None:
        """Leave a worker out for the rest of the request."""
        self._excluded.add(name)

    def excluded(self, now: float) -> set[str]:
        """Return the workers to leave out at time ``now``."""
        return self._excluded | {name for name, until in self._excluded_until.items() if now < until}

    def add_move(self, name: str, now: float) -> None:
        """Record a worker that gave the request away."""
        self._last_refusal = None
        self._excluded_until[name] = now + _EXCLUDE_SECONDS

    def add_refusal(self, name: str, error: Error, now: float, *, opened: bool) -> None:
        """Record a retryable error; ``opened`` is true if a worker had accepted the request before."""
        self._excluded_until[name] = now + _EXCLUDE_SECONDS
        code = _code(error)
        if opened and code == _CRASH_CODE:
            self.crashes += 1
            return
        if code == _INCOMPATIBLE_CODE:
            self._excluded.add(name)
        self._last_refusal = error
        self._refusals += not opened

    def add_failure(self, name: str, now: float, *, crashed: bool) -> None:
        """Record a broken connection; ``crashed`` is true if the worker had begun its answer."""
        self._last_refusal = None
        self._excluded_until[name] = now + _EXCLUDE_SECONDS
        self.crashes += crashed

    def check(self) -> None:
        """Raise an error if the request must not be tried again.

        Raises:
            RefusedByWorker: Enough workers have refused the request.
            ApiError: Enough workers have failed while they served it.
        """
        if self.crashes >= self._max_crashes:
            message = f"{self.crashes} workers failed while they served this request; it is not tried again"
            raise ApiError(500, message, code="worker_failed", headers={"X-Should-Retry": "false"})
        if self._refusals >= self._max_refusals and self._last_refusal is not None:
            raise RefusedByWorker(self._last_refusal)

    def final_refusal(self) -> Error | None:
        """Return the last refusal if waiting for another worker is of no use: the client should try again later."""
        refusal = self._last_refusal
        return refusal if refusal is not None and refusal.status == 429 else None

    def no_worker(self, *, continues: bool) -> ApiError | RefusedByWorker:
        """Return the error for a request that no worker takes in time."""
        if self._last_refusal is not None and not continues:
            return RefusedByWorker(self._last_refusal)
        what = "continue this request with the same text" if continues else "serve this request"
        return ApiError(
            503, f"no worker can {what} now; try again later", code="no_worker", headers={"Retry-After": "1"}
        )


def _code(error: Error) -> str | None:
    try:
        code = json.loads(error.body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return code if isinstance(code, str) else None


def deadline_exceeded() -> ApiError:
    """Return the error for a request whose deadline passed, as a worker writes it."""
    message = "the deadline of this request passed before it was complete; see X-Request-Timeout"
    return ApiError(504, message, code="deadline_exceeded", headers={"X-Should-Retry": "false"})
