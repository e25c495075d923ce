"""Where the time of steps goes: a stopwatch whose laps add up. On an accelerator, waiting for it counts as verify."""

from __future__ import annotations

import time
from typing import Literal

from specdecode_worker.contract import PhaseSeconds

Phase = Literal["draft", "verify", "sample", "bookkeeping"]


class Phases:
    """Seconds by phase, since the engine began."""

    def __init__(self) -> None:
        self._seconds: dict[Phase, float] = {"draft": 0.0, "verify": 0.0, "sample": 0.0, "bookkeeping": 0.0}
        self._at = 0.0

    def start(self) -> None:
        self._at = time.monotonic()

    def lap(self, phase: Phase) -> float:
        """Counts the time since the lap before, and tells it."""
        now = time.monotonic()
        lasted, self._at = now - self._at, now
        self._seconds[phase] += lasted
        return lasted

    @property
    def seconds(self) -> PhaseSeconds:
        return PhaseSeconds(**self._seconds)
