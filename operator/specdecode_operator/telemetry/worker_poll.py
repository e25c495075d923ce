"""State of polling one worker: its last good report, and the time before which it is not asked again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdecode_operator.errors import BadReport, Unauthorized, WorkerError, WorkerTimeout, WorkerUnreachable
from specdecode_operator.state.deployment_state import WorkerReading
from specdecode_operator.state.session import Baseline
from specdecode_operator.telemetry.deltas import Totals, regression
from specdecode_operator.telemetry.plan_push import RunningPlan
from specdecode_operator.telemetry.worker_client import Reading, Unchanged

MAX_BACKOFF_SECONDS = 30.0
"""Longest time between two calls of a worker that does not answer; status shows a stale report after 30 s."""
NOT_ASKED = "not asked in time"
"""Problem of a worker whose turn did not come within the round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Pod of a worker, as the pod cache has it."""

    uid: str
    name: str
    address: str | None
    ready: bool
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPoll:
    """State of polling one pod. Times are seconds of the scraper's monotonic clock."""

    target: Target
    baseline: Baseline | None = None
    """Last report that was read and believed. The next report is compared with it."""
    totals: Totals | None = None
    """Counters of that report, so that it need not be unpacked for the comparison."""
    running: RunningPlan | None = None
    """Plan in the last believed report."""
    reading: WorkerReading | None = None
    """Result of the latest attempt. None before the first one."""
    asked_at: float = 0
    """Start of the latest attempt that ended with a result."""
    timeouts: int = 0
    """Attempts in a row without a complete answer."""
    not_before: float = 0
    """The worker is not asked before this time."""
    is_unauthorized: bool = False
    """True if the latest call failed because the worker accepts none of the tokens."""

    @property
    def has_report(self) -> bool:
        """True if the latest attempt brought a report."""
        return self.reading is not None and self.reading.baseline is not None

    def follow(self, target: Target) -> WorkerPoll:
        """Return the state for the pod as it is now. A pod that became ready or moved is asked without delay."""
        if target == self.target:
            return self
        restarted = (target.ready and not self.target.ready) or target.address != self.target.address
        if restarted:
            return replace(self, target=target, timeouts=0, not_before=0)
        return replace(self, target=target)

    def answered(self, answer: Reading | Unchanged, *, started: float, at: float) -> WorkerPoll:
        """Return the state after an answer.

        Args:
            answer: The answer.
            started: Start of the call, on the monotonic clock.
            at: Time of the reading, in seconds since the epoch.
        """
        asked = replace(self, asked_at=started, timeouts=0, not_before=0, is_unauthorized=False)
        if isinstance(answer, Unchanged):
            assert self.baseline is not None, "an ETag is sent only with a known report"
            baseline, running = self.baseline.at(answer.clock_seconds), self.running
        else:
            problem = regression(self._known_totals, answer.report)
            if problem is not None:
                return replace(asked, reading=WorkerReading(at=at, problem=problem))
            baseline, running = Baseline.of(answer.report, answer.tag), RunningPlan.of(answer.report)
            asked = replace(asked, totals=Totals.of(answer.report))
        return replace(asked, baseline=baseline, running=running, reading=WorkerReading(at=at, baseline=baseline))

    @property
    def _known_totals(self) -> Totals | None:
        """Totals at the last contact: an unchanged report has the totals of the one before, at a later clock."""
        if self.totals is None or self.baseline is None:
            return None
        return self.totals._replace(clock_seconds=self.baseline.clock_seconds)

    def failed(self, error: Exception, *, started: float, at: float, period: float) -> WorkerPoll:
        """Return the state after a failed call. ``period`` is the time between rounds, in seconds."""
        timeouts = self.timeouts + 1 if isinstance(error, WorkerTimeout) else 0
        text = str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
        return replace(
            self,
            reading=WorkerReading(at=at, problem=text),
            asked_at=started,
            timeouts=timeouts,
            is_unauthorized=isinstance(error, Unauthorized),
            not_before=started + backoff_seconds(timeouts, period) if timeouts > 1 else 0,
        )

    def not_asked(self, *, at: float) -> WorkerPoll:
        """Return the state after a round that ended before this worker answered or was asked."""
        return replace(self, reading=WorkerReading(at=at, problem=NOT_ASKED))


def backoff_seconds(timeouts: int, period: float) -> float:
    """Return the time until the next call after that many timeouts in a row.

    It ends half a period early, so that the call belongs to the round that is nearest.
    """
    return min(MAX_BACKOFF_SECONDS, period * 2.0 ** min(timeouts - 1, 30)) - period / 2


def failure_reason(error: Exception) -> str:
    """Return the label under which a failed call is counted."""
    if isinstance(error, WorkerTimeout):
        return "timeout"
    if isinstance(error, WorkerUnreachable):
        return "unreachable"
    if isinstance(error, Unauthorized):
        return "unauthorized"
    if isinstance(error, BadReport):
        return "bad_report"
    return "refused" if isinstance(error, WorkerError) else "internal"
