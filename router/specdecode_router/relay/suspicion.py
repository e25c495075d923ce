"""Suspicion: after how much silence a worker gets a second attempt of its request on another worker."""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_router.settings import RouterSettings

_MISSED_ALIVES = 4
"""Intervals of ``Alive`` that may pass: late frames of a busy network or process are no sign of a failure."""
_STEP_FACTOR = 8
"""An engine inside of one step for this many times its longest step so far is suspected."""
_MIN_STEP_SECONDS = 5.0
"""Least time inside of one step: the first long prompt takes longer than every step before it."""
_PAUSE_SECONDS = 0.1
"""Longest write to a client that counts as none."""


@dataclass(slots=True)
class WorkerSigns:
    """Signs of life of the worker of one attempt. Times are those of one monotonic clock, in seconds."""

    last_frame: float
    """Time of the last bytes from the worker."""
    step: int = -1
    """Number of the engine's last step."""
    step_since: float = 0.0
    """Time at which that number was first seen."""
    longest_step_seconds: float = 0.0

    def observe_alive(self, step: int, longest_step_seconds: float, now: float) -> None:
        """Record an ``Alive``."""
        if step != self.step:
            self.step, self.step_since = step, now
        self.longest_step_seconds = longest_step_seconds

    def end_pause(self, now: float) -> None:
        """Record that frames are read again. If they were not for a while, the signs are old, not the worker silent."""
        if now - self.last_frame > _PAUSE_SECONDS:
            self.step = -1
        self.last_frame = now


def silence_bound(
    alive_seconds: float, longest_step_seconds: float, limits: RouterSettings, factor: float = 1.0
) -> float:
    """Return the silence in seconds after which a worker is suspected.

    Args:
        alive_seconds: Interval of ``Alive``.
        longest_step_seconds: Longest step of the worker; its process may beat only between two steps.
        limits: Settings with the bounds of the result, before ``factor``.
        factor: 2 to the number of false suspicions of this request.
    """
    bound = _MISSED_ALIVES * alive_seconds + longest_step_seconds
    return factor * min(max(bound, limits.min_silence_seconds), limits.max_silence_seconds)


def is_suspect(
    signs: WorkerSigns, now: float, alive_seconds: float, limits: RouterSettings, factor: float = 1.0
) -> bool:
    """Return whether a worker's frames have stopped, or its engine is inside of one step for too long."""
    if now - signs.last_frame > silence_bound(alive_seconds, signs.longest_step_seconds, limits, factor):
        return True
    if signs.step < 0 or signs.longest_step_seconds <= 0:
        return False
    step_bound = factor * max(_STEP_FACTOR * signs.longest_step_seconds, _MIN_STEP_SECONDS)
    return now - signs.step_since > step_bound
