"""States of a row, every transition between them, and how they are stored."""

from __future__ import annotations

import json

import pytest
from estimates import cost

from specdecode_operator.planning.row_states import State, next_row, recent_changes, state_of
from specdecode_operator.state.learned import LearnedState, RowState, parse_state, render_state
from specdecode_worker.contract import TreeShape

DRAFTS, PLAIN = TreeShape.chain(2), TreeShape.chain(0)
ROWS = {
    State.STEADY: RowState(concurrency=0, context=0, task="other", depth=3, since=100, moves=(100.0,)),
    State.OFF: RowState(concurrency=0, context=0, task="other", depth=0, since=100, moves=(100.0,)),
    State.TRIAL: RowState(concurrency=0, context=0, task="other", depth=3, since=100, moves=(100.0,), trial=True),
    State.PROBE: RowState(concurrency=0, context=0, task="other", depth=3, since=100, moves=(100.0,), probing=True),
}


@pytest.mark.parametrize("state", State)
def test_every_transition(state: State) -> None:
    row = ROWS[state]
    assert state_of(row) is state
    for shape in (DRAFTS, PLAIN, row.shape):
        moved = next_row(row, shape, 200.0)
        assert state_of(moved) is (State.STEADY if shape.nodes else State.OFF)
        assert (moved.shape, moved.moves) == (shape, (100.0, 200.0))
        assert moved.since == (100 if shape == row.shape else 200)


@pytest.mark.parametrize(("state", "after"), [(State.STEADY, State.TRIAL), (State.OFF, State.PROBE)])
def test_a_trial_after_plain_decoding_is_a_probe(state: State, after: State) -> None:
    assert state_of(next_row(ROWS[state], DRAFTS, 200.0, is_trial=True)) is after


def test_the_end_of_a_trial_is_no_change() -> None:
    trial = ROWS[State.TRIAL]
    stays = next_row(trial, trial.shape, 200.0, counts=False)
    assert (stays.since, stays.moves, stays.trial) == (100, (100.0,), False)


def test_changes_are_forgotten_after_an_hour() -> None:
    assert recent_changes(ROWS[State.STEADY], 3699.0) == (100.0,)
    assert recent_changes(ROWS[State.STEADY], 3700.0) == ()
    assert recent_changes(ROWS[State.STEADY], 3699.0, after=100.0) == ()


def test_rows_of_an_earlier_operator_are_read() -> None:
    """It stored its back-off and its patience in fields that are gone."""
    old = {"concurrency": 0, "context": 0, "task": "other", "depth": 0, "since": 5.0, "off_until": 65.0}
    row = RowState.model_validate({**old, "patience": 60.0, "no_trial_until": 9.0, "trial_patience": 900.0})
    assert state_of(row) is State.OFF
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
