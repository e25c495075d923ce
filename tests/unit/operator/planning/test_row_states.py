"""States of a row, every transition between them, and how they are stored."""

from __future__ import annotations

import pytest

from specdecode_operator.planning.search import next_row, recent_changes
from specdecode_operator.state.learned import RowState
from specdecode_worker.contract import TreeShape

DRAFTS, PLAIN = TreeShape.chain(2), TreeShape.chain(0)
DRAFTING = RowState(concurrency=0, context=0, task="other", depth=3, since=100, moves=(100.0,))
TRIAL, OFF = DRAFTING.model_copy(update={"before": (0,)}), DRAFTING.model_copy(update={"depth": 0})


@pytest.mark.parametrize("row", [DRAFTING, TRIAL, OFF], ids=["drafting", "trial", "off"])
def test_every_transition(row: RowState) -> None:
    for shape in (DRAFTS, PLAIN, row.shape):
        moved = next_row(row, shape, 200.0)
        assert (moved.shape, moved.moves, moved.trial) == (shape, (100.0, 200.0), False)
        assert moved.since == (100 if shape == row.shape else 200)
    trial = next_row(row, DRAFTS, 200.0, is_trial=True)
    assert (trial.trial, trial.settled_shape) == (True, row.shape)


def test_the_end_of_a_trial_is_no_change() -> None:
    stays = next_row(TRIAL, TRIAL.shape, 200.0, counts=False)
    assert (stays.since, stays.moves, stays.trial) == (100, (100.0,), False)


def test_changes_are_forgotten_after_an_hour() -> None:
    assert recent_changes(DRAFTING.moves, 3699.0) == (100.0,)
    assert recent_changes(DRAFTING.moves, 3700.0) == ()
