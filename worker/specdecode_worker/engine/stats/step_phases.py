"""Timer of the phases of a step.

On an accelerator, the time that the host waits for the device counts as verify.
"""

from __future__ import annotations

import time
from typing import Literal

from specdecode_worker.contract import PhaseSeconds

Phase = Literal["draft", "verify", "sample", "bookkeeping"]


class PhaseTimer:
    """Accumulated seconds by phase since the engine started."""

    def __init__(self) -> None:
        self._seconds: dict[Phase, float] = {"draft": 0.0, "verify": 0.0, "sample": 0.0, "bookkeeping": 0.0}
        self._at = 0.0

    def start(self) -> None:
        """Start timing the first phase."""
        self._at = time.monotonic()

    def lap(self, phase: Phase) -> float:
        """Add the time since the last call of `start` or `lap` to ``phase``, and return it in seconds."""
        now = time.monotonic()
        lasted, self._at = now - self._at, now
        self._seconds[phase] += lasted
        return lasted

    @property
    def seconds(self) -> PhaseSeconds:
        """Accumulated seconds by phase, as reported."""
        return PhaseSeconds(**self._seconds)
