"""States of a row: every transition, and the times at which a row may change by itself."""

from __future__ import annotations

import json
from itertools import product

import pytest
from estimates import cost, spec

from specdecode_operator.planning.row_states import TRANSITIONS, Off, Probe, Steady, Trial, next_row, state_of, wakes_at
from specdecode_operator.state.learned import LearnedState, RowState, parse_state, render_state
from specdecode_worker.contract import TreeShape

DRAFTS, PLAIN = TreeShape.chain(2), TreeShape.chain(0)
ROWS = {
    Steady: RowState(concurrency=0, context=0, task="other", depth=3, since=100, moves=(100.0,)),
    Off: RowState(concurrency=0, context=0, task="other", depth=0, since=100, moves=(100.0,)),
    Trial: RowState(concurrency=0, context=0, task="other", depth=3, since=100, moves=(100.0,), trial=True),
    Probe: RowState(concurrency=0, context=0, task="other", depth=3, since=100, moves=(100.0,), probing=True),
}


@pytest.mark.parametrize(("state", "shape", "is_trial"), [*product(ROWS, (DRAFTS, PLAIN), (False, True))])
def test_every_transition(state: type[Steady], shape: TreeShape, is_trial: bool) -> None:
    row = ROWS[state]
    assert type(state_of(row, 200.0)) is state
    event = "try" if is_trial else "settle" if shape.nodes else "stop"
    if (state, event) not in TRANSITIONS:
        with pytest.raises(KeyError):
            next_row(row, shape, 200.0, is_trial=is_trial)
        return
    after = next_row(row, shape, 200.0, is_trial=is_trial)
    expected = {"settle": Steady, "stop": Off}.get(event, Probe if state is Off else Trial)
    if is_trial and not shape.nodes:
        return  # nothing is tried by decoding plainly
    assert type(state_of(after, 200.0)) is expected
    assert (after.shape, after.moves) == (shape, (100.0, 200.0))
    assert after.since == (100 if shape == row.shape else 200)


def test_the_end_of_a_trial_is_no_change() -> None:
    stays = next_row(ROWS[Trial], ROWS[Trial].shape, 200.0, counts=False)
    assert (stays.since, stays.moves, stays.trial) == (100, (100.0,), False)


def test_changes_are_forgotten_after_an_hour() -> None:
    assert state_of(ROWS[Steady], 3699.0).changes == (100.0,)
    assert state_of(ROWS[Steady], 3700.0).changes == ()


@pytest.mark.parametrize(("state", "wakes"), [(Steady, False), (Trial, True), (Probe, True)])
def test_a_trial_wakes_when_its_time_is_over(state: type[Steady], wakes: bool) -> None:
    hysteresis = spec(hysteresis={"minDwellSeconds": 7, "maxChangesPerHour": 12}).hysteresis
    times = set(wakes_at(ROWS[state], hysteresis))
    assert (160.0 in times) == wakes
    assert {107.0, 128.0, 3700.0, 400.0} <= times, "dwell, its growth, the hour, and the age of an outdated row"


def test_rows_of_an_earlier_operator_are_read() -> None:
    """It stored its back-off and its patience in fields that are gone."""
    old = {"concurrency": 0, "context": 0, "task": "other", "depth": 0, "since": 5.0, "off_until": 65.0}
    row = RowState.model_validate({**old, "patience": 60.0, "no_trial_until": 9.0, "trial_patience": 900.0})
    assert type(state_of(row, 10.0)) is Off
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
