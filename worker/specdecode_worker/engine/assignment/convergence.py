"""Attempts to reach the assigned draft, with a back-off after failures. This module reads no clock."""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_worker.engine.assignment.assigned_draft import DraftGoal

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 5.0, 300.0
"""Wait after the first failure, doubled after each further one, and its limit. A claim may be mounted late."""


@dataclass(slots=True)
class Convergence:
    """Draft to reach, or None once it runs or a person has chosen another draft."""

    goal: DraftGoal | None = None
    failures: int = 0
    due_seconds: float = 0.0
    """Time of the next attempt."""

    def aim(self, goal: DraftGoal, now: float) -> None:
        """Set the goal. The same goal again does not shorten the wait after a failure."""
        if goal != self.goal:
            self.goal, self.failures, self.due_seconds = goal, 0, now

    def clear(self) -> None:
        """Give up the goal, reached or not."""
        self.goal = None

    def is_due(self, now: float) -> bool:
        """Return whether an attempt has to be made."""
        return self.goal is not None and now >= self.due_seconds

    def record_failure(self, now: float) -> None:
        """Schedule the next attempt."""
        self.due_seconds = now + min(FIRST_RETRY_SECONDS * 2.0**self.failures, MAX_RETRY_SECONDS)
        self.failures = min(self.failures + 1, 30)
