"""States of a plan row, and the transitions between them.

| state | a change to drafts | a change to plain decoding | a trial |
|---|---|---|---|
| Steady: runs its shape until another is worth a change | Steady | Off | Trial |
| Off: decodes plainly | Steady | Off | Probe |
| Trial: runs a shape that was never timed here | Steady | Off | - |
| Probe: drafts again after Off, to be timed again | Steady | Off | - |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from specdecode_operator.api.v1alpha1 import HysteresisSpec
from specdecode_operator.planning.tuning import HOUR_SECONDS, TUNING
from specdecode_operator.state.learned import RowState
from specdecode_worker.contract import TreeShape


@dataclass(frozen=True, slots=True)
class Steady:
    """The row runs its shape since ``since``; ``changes`` are the times of its changes within the last hour."""

    since: float
    changes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Off(Steady):
    """The row decodes plainly. Speculation comes back when it is worth a change or a probe."""


@dataclass(frozen=True, slots=True)
class Trial(Steady):
    """The row runs a shape of unknown step time, until it is timed."""


@dataclass(frozen=True, slots=True)
class Probe(Trial):
    """The row drafts again after Off, until its step time is fresh."""


Event = Literal["settle", "stop", "try"]
TRANSITIONS: Mapping[tuple[type[Steady], Event], type[Steady]] = {
    **{(state, "settle"): Steady for state in (Steady, Off, Trial, Probe)},
    **{(state, "stop"): Off for state in (Steady, Off, Trial, Probe)},
    (Steady, "try"): Trial,
    (Off, "try"): Probe,
}


def state_of(row: RowState, now: float) -> Steady:
    """Return the state of a stored row. Changes more than an hour ago are left out."""
    kind = Probe if row.probing else Trial if row.trial else Steady if row.depth else Off
    return kind(row.since, tuple(at for at in row.moves if now - at < HOUR_SECONDS))


def next_row(row: RowState, shape: TreeShape, now: float, *, is_trial: bool = False, counts: bool = True) -> RowState:
    """Return the row after a change to ``shape``, or after the end of its trial.

    Args:
        row: Row before.
        shape: Shape that it runs from now on.
        now: Operator's clock, in seconds.
        is_trial: The shape runs to be timed.
        counts: The change counts against the changes of the hour. The end of a trial does not.
    """
    state = state_of(row, now)
    after = TRANSITIONS[type(state), "try" if is_trial else "settle" if shape.nodes else "stop"]
    changes = (*state.changes, now) if counts else row.moves
    since = row.since if shape == row.shape else now
    return row.running(shape, since=since, moves=changes, trial=after is Trial, probing=after is Probe)


def dwell_seconds(state: Steady, hysteresis: HysteresisSpec, changed_at: float) -> float:
    """Return how long the row keeps its shape. Each further change within an hour is likelier to be chance.

    Changes before the last change point (``changed_at``) do not count.
    """
    count = sum(at > changed_at for at in state.changes)
    return float(hysteresis.min_dwell_seconds * TUNING.growth ** (2 * max(0, count - 1)))


def outdated_seconds(hysteresis: HysteresisSpec) -> float:
    """Return the age at which a change point outdates a row: the mean time between the changes that are allowed."""
    return HOUR_SECONDS / hysteresis.max_changes_per_hour


def wakes_at(row: RowState, hysteresis: HysteresisSpec) -> Iterator[float]:
    """Yield every time at which the row may change without new measurements."""
    state = state_of(row, 0.0)
    if isinstance(state, Trial):
        yield state.since + TUNING.window_seconds
    yield state.since + outdated_seconds(hysteresis)
    for count, at in enumerate((*state.changes, 0.0)):
        yield at + HOUR_SECONDS
        yield state.since + hysteresis.min_dwell_seconds * TUNING.growth ** (2 * count)
