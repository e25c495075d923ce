"""Continuations and second attempts of one request, for the metrics."""

from __future__ import annotations

from specdecode_router.relay.attempt import Attempt, Failed
from specdecode_router.telemetry.metrics import HedgeOutcome, ResumeOutcome, ResumeReason, RouterMetrics
from specdecode_worker.contract.internal_stream import Error, Moved


def reason_of(outcome: Error | Moved | Failed) -> ResumeReason:
    """Return the reason for a continuation after an attempt that ended like this."""
    if isinstance(outcome, Moved):
        return ResumeReason.moved
    return ResumeReason.error if isinstance(outcome, Error) else ResumeReason.connection


class ContinuationLog:
    """Counts the continuations of one request, once it is known how they end."""

    __slots__ = ("_hedge", "_metrics", "_reason", "last_token")

    def __init__(self, metrics: RouterMetrics, now: float) -> None:
        self._metrics = metrics
        self._reason: ResumeReason | None = None
        self._hedge: Attempt | None = None
        self.last_token = now
        """Time of the last token for the client."""

    def begin(self, reason: ResumeReason) -> None:
        """Record that the request needs another worker. The first reason counts until a token comes."""
        if self._reason is None:
            self._reason = reason

    def begin_hedge(self, attempt: Attempt) -> None:
        """Record a second attempt."""
        self._hedge = attempt

    def deliver(self, attempt: Attempt, now: float) -> None:
        """Record that an attempt delivered while a continuation or a second attempt was under way."""
        if self._reason is not None:
            if attempt.resumed and not attempt.delivered:
                self._metrics.count_resume(self._reason, ResumeOutcome.resumed, now - self.last_token)
            self._reason = None
        if self._hedge is not None:
            self._metrics.count_hedge(HedgeOutcome.won if self._hedge is attempt else HedgeOutcome.lost)
            self._hedge = None

    def lose(self, attempt: Attempt) -> None:
        """Record that an attempt failed."""
        if self._hedge is attempt:
            self._metrics.count_hedge(HedgeOutcome.failed)
            self._hedge = None

    def close(self, outcome: ResumeOutcome) -> None:
        """Record the end of the request. Continuations that are under way end with ``outcome``."""
        if self._reason is not None:
            self._metrics.count_resume(self._reason, outcome)
            self._reason = None
        if self._hedge is not None:
            self.lose(self._hedge)

    @property
    def is_open(self) -> bool:
        """True while a continuation or a second attempt is under way."""
        return self._reason is not None or self._hedge is not None
