"""State of a plan row: it runs its shape until another is worth a change, or it is on trial to be timed. Pure."""

from __future__ import annotations

from specdecode_operator.planning.tuning import HOUR_SECONDS
from specdecode_operator.state.learned import RowState
from specdecode_worker.contract import TreeShape


def next_row(row: RowState, shape: TreeShape, now: float, *, is_trial: bool = False, counts: bool = True) -> RowState:
    """Return the row after a change to ``shape``, which runs to be timed if ``is_trial``, or after the end of a trial.

    ``counts`` says whether the change counts against the changes of the hour. The end of a trial does not.
    """
    moves = (*recent_changes(row.moves, now), now) if counts else row.moves
    before = row.shape.parents if is_trial else None
    return row.running(shape, since=row.since if shape == row.shape else now, moves=moves, before=before)


def recent_changes(moves: tuple[float, ...], now: float) -> tuple[float, ...]:
    """Return the times of changes within the last hour."""
    return tuple(at for at in moves if now - at < HOUR_SECONDS)
