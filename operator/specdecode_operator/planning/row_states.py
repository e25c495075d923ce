"""State of a plan row: it runs its shape until another is worth a change, or it is on trial to be timed. Pure."""

from __future__ import annotations

from specdecode_operator.api.v1alpha1 import HysteresisSpec
from specdecode_operator.planning.tuning import HOUR_SECONDS, TUNING
from specdecode_operator.state.learned import RowState
from specdecode_worker.contract import TreeShape


def next_row(row: RowState, shape: TreeShape, now: float, *, is_trial: bool = False, counts: bool = True) -> RowState:
    """Return the row after a change to ``shape``, which runs to be timed if ``is_trial``, or after the end of a trial.

    ``counts`` says whether the change counts against the changes of the hour. The end of a trial does not.
    """
    moves = (*recent_changes(row.moves, now), now) if counts else row.moves
    return row.running(shape, since=row.since if shape == row.shape else now, moves=moves, trial=is_trial)


def recent_changes(moves: tuple[float, ...], now: float, after: float = 0.0) -> tuple[float, ...]:
    """Return the times of changes within the last hour, as far as they are later than ``after``."""
    return tuple(at for at in moves if now - at < HOUR_SECONDS and at > after)


def dwell_seconds(changes: int, hysteresis: HysteresisSpec) -> float:
    """Return how long a row keeps its shape after ``changes`` within an hour: each is likelier to be chance."""
    return float(hysteresis.min_dwell_seconds * TUNING.growth ** (2 * max(0, changes - 1)))
