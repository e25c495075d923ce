"""States of a row, every transition between them, and how they are stored."""

from __future__ import annotations

import json

import pytest

from specdecode_operator.planning.row_states import next_row, recent_changes
from specdecode_operator.state.learned import LearnedState, RowState, parse_state, render_state
from specdecode_worker.contract import TreeShape
from support.operators.estimates import cost

DRAFTS, PLAIN = TreeShape.chain(2), TreeShape.chain(0)
DRAFTING = RowState(concurrency=0, context=0, task="other", depth=3, since=100, moves=(100.0,))
TRIAL, OFF = DRAFTING.model_copy(update={"trial": True}), DRAFTING.model_copy(update={"depth": 0})


@pytest.mark.parametrize("row", [DRAFTING, TRIAL, OFF], ids=["drafting", "trial", "off"])
def test_every_transition(row: RowState) -> None:
    for shape in (DRAFTS, PLAIN, row.shape):
        moved = next_row(row, shape, 200.0)
        assert (moved.shape, moved.moves, moved.trial) == (shape, (100.0, 200.0), False)
        assert moved.since == (100 if shape == row.shape else 200)
    assert next_row(row, DRAFTS, 200.0, is_trial=True).trial


def test_the_end_of_a_trial_is_no_change() -> None:
    stays = next_row(TRIAL, TRIAL.shape, 200.0, counts=False)
    assert (stays.since, stays.moves, stays.trial) == (100, (100.0,), False)


def test_changes_are_forgotten_after_an_hour() -> None:
    assert recent_changes(DRAFTING.moves, 3699.0) == (100.0,)
    assert recent_changes(DRAFTING.moves, 3700.0) == ()


def test_rows_of_an_earlier_operator_are_read() -> None:
    """It stored its back-off and its patience in fields that are gone."""
    old = {"concurrency": 0, "context": 0, "task": "other", "depth": 0, "since": 5.0, "off_until": 65.0}
    row = RowState.model_validate({**old, "patience": 60.0, "no_trial_until": 9.0, "trial_patience": 900.0})
    learned = LearnedState(uid="u", draft="d", rows=(row,))
    assert parse_state(render_state(learned), "u") == learned


def test_step_times_of_an_earlier_operator_are_read() -> None:
    """It also counted the minutes that steps came from."""
    cells = [cost(1, depth, 0.03) for depth in (0, 3)]
    learned = LearnedState(uid="u", draft="d", costs=tuple(cells))
    old = {key: json.loads(text) for key, text in render_state(learned).items()}
    assert sum("costs" in section for section in old.values()) == 2
    for section in old.values():
        for cell in section.get("costs", ()):
            cell.update(spells=2.0, spell_at=900.0)
    read = parse_state({key: json.dumps(section) for key, section in old.items()}, "u")
    assert read is not None
    assert read.costs
    assert read == parse_state(render_state(learned), "u")
