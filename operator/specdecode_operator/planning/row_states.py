"""States of a plan row, and the transitions between them.

| state | a change to drafts | a change to plain decoding | a trial |
|---|---|---|---|
| Steady: runs its shape until another is worth a change | Steady | Off | Trial |
| Off: decodes plainly | Steady | Off | Probe |
| Trial: runs a shape that was never timed here | Steady | Off | - |
| Probe: drafts again after Off, to be timed again | Steady | Off | - |
"""

from __future__ import annotations

from enum import Enum

from specdecode_operator.api.v1alpha1 import HysteresisSpec
from specdecode_operator.planning.tuning import HOUR_SECONDS, TUNING
from specdecode_operator.state.learned import RowState
from specdecode_worker.contract import TreeShape


class State(Enum):
    """State of a row."""

    STEADY = "Steady"
    OFF = "Off"
    TRIAL = "Trial"
    PROBE = "Probe"


def state_of(row: RowState) -> State:
    """Return the state of a stored row."""
    if row.probing or row.trial:
        return State.PROBE if row.probing else State.TRIAL
    return State.STEADY if row.depth else State.OFF


def is_timed_now(row: RowState) -> bool:
    """Return whether the row runs its shape to be timed."""
    return state_of(row) in (State.TRIAL, State.PROBE)


def next_row(row: RowState, shape: TreeShape, now: float, *, is_trial: bool = False, counts: bool = True) -> RowState:
    """Return the row after a change to ``shape``, which runs to be timed if ``is_trial``, or after the end of a trial.

    ``counts`` says whether the change counts against the changes of the hour. The end of a trial does not.
    """
    return row.running(
        shape,
        since=row.since if shape == row.shape else now,
        moves=(*recent_changes(row, now), now) if counts else row.moves,
        trial=is_trial and state_of(row) is State.STEADY,
        probing=is_trial and state_of(row) is State.OFF,
    )


def recent_changes(row: RowState, now: float, after: float = 0.0) -> tuple[float, ...]:
    """Return the times of the row's changes within the last hour, as far as they are later than ``after``."""
    return tuple(at for at in row.moves if now - at < HOUR_SECONDS and at > after)


def dwell_seconds(changes: int, hysteresis: HysteresisSpec) -> float:
    """Return how long a row keeps its shape after ``changes`` within an hour: each is likelier to be chance."""
    return float(hysteresis.min_dwell_seconds * TUNING.growth ** (2 * max(0, changes - 1)))


def outdated_seconds(hysteresis: HysteresisSpec) -> float:
    """Return the age at which a change point outdates a row: the mean time between the changes that are allowed."""
    return HOUR_SECONDS / hysteresis.max_changes_per_hour
