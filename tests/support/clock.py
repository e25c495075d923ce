"""Manual clock for tests: its time changes only when a test sets it."""

from __future__ import annotations


class Clock:
    """Clock that returns ``now``, in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
