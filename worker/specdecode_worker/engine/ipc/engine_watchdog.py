"""Policy of the engine watchdog: whether an engine makes progress, is suspect or hangs, by its heartbeat."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from specdecode_worker.engine.ipc.heartbeat import Heartbeat, Phase

SUSPECT_SHARE = 0.5
"""Share of the bound after which an engine is suspect."""
LONGEST_STEP_FACTOR = 10.0
"""A step may take this many times as long as the longest step so far."""
SECONDS_PER_PREFILL_TOKEN = 0.02
"""Time that a prefill token may take, which is 50 tokens a second: slow for an 8B model on a CPU."""
PHASE_SECONDS = {
    Phase.WARMING_UP: 1800.0,
    Phase.CALIBRATING: 600.0,
    Phase.CAPTURING: 1800.0,
    Phase.SWAPPING: 600.0,
}
"""Bounds of phases without steps of clients. The first steps may compile kernels, which takes minutes."""
MAX_POLL_GAP_SECONDS = 5.0
"""Time between two observations beyond which the whole machine or container was stopped, and not the engine alone."""


class State(Enum):
    """Judgement of the watchdog."""

    OK = auto()
    SUSPECT = auto()
    HUNG = auto()


@dataclass(frozen=True, slots=True)
class Assessment:
    """State of the engine with the facts behind it."""

    state: State
    heartbeat: Heartbeat
    silent_seconds: float
    """Time without a beat."""
    bound_seconds: float | None
    """Time without a beat after which the engine is hung; None for no bound."""

    def __str__(self) -> str:
        beat = self.heartbeat
        bound = "" if self.bound_seconds is None else f" (bound {self.bound_seconds:.1f} s)"
        return (
            f"no progress for {self.silent_seconds:.1f} s{bound} in phase {beat.phase.name.lower()}, "
            f"step {beat.step}, {beat.rows} rows, {beat.prefill_tokens} prefill tokens, "
            f"longest step so far {beat.longest_step_seconds:.2f} s"
        )


def bound_seconds(beat: Heartbeat, step_timeout_seconds: float) -> float | None:
    """Return the time without a beat after which an engine in this phase is hung; None for no bound.

    Loading has no bound, because the startup probe of the pod limits it.
    """
    step_seconds = max(
        step_timeout_seconds,
        LONGEST_STEP_FACTOR * beat.longest_step_seconds,
        SECONDS_PER_PREFILL_TOKEN * beat.prefill_tokens,
    )
    match beat.phase:
        case Phase.LOADING:
            return None
        case Phase.STEP:
            return step_seconds
        case Phase.IDLE:
            return step_timeout_seconds
        case phase:
            return max(PHASE_SECONDS[phase], step_seconds)


class EngineWatchdog:
    """Judge of one engine. It observes the heartbeat several times a second and knows no clock of its own."""

    def __init__(self, step_timeout_seconds: float) -> None:
        self._step_timeout_seconds = step_timeout_seconds
        self._observed_seconds: float | None = None
        self._resumed_seconds = 0.0
        self._state = State.OK

    def observe(self, beat: Heartbeat, now: float) -> Assessment:
        """Judge the engine by its heartbeat at this time.

        An engine is hung only if it was suspect before, so that no single reading ends a worker. After a gap between
        two observations the silence counts from the second one: the process of the watchdog did not run either.
        """
        if self._observed_seconds is not None and now - self._observed_seconds > MAX_POLL_GAP_SECONDS:
            self._resumed_seconds = now
        self._observed_seconds = now
        silent_seconds = max(now - max(beat.beat_seconds, self._resumed_seconds), 0.0)
        bound = bound_seconds(beat, self._step_timeout_seconds)
        self._state = self._judge(silent_seconds, bound)
        return Assessment(self._state, beat, silent_seconds, bound)

    def _judge(self, silent_seconds: float, bound: float | None) -> State:
        if bound is None or silent_seconds < SUSPECT_SHARE * bound:
            return State.OK
        return State.HUNG if silent_seconds >= bound and self._state is not State.OK else State.SUSPECT
