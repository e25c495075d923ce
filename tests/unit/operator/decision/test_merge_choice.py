"""The rule for merged drafts: never outside of the spec, sure of a gain, and dropped drafts are tried again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdecode_operator.decision.merging import (
    COMMON,
    Credit,
    Option,
    Step,
    TaskDrafts,
    all_declared,
    gain_text,
    listed,
    next_step,
    options_of,
    renewed,
    subsets_of,
)
from specdecode_operator.planning.acceptance import AcceptanceModel, Bounds, Objective, tasks_at
from specdecode_operator.planning.estimates import TUNING, Load, StepTimeModel
from specdecode_operator.planning.search import LoadDecision, ShapeSearch
from specdecode_operator.state.learned import CreditCell, LearnedState, LoadState, MergeChoice, RowState
from specdecode_worker.contract import TreeShape
from support.operators.estimates import FULL, chances, spec
from support.operators.merging import any_credit

NOW = 10_000.0
TASK = "other"
DECLARED = ("lookup", "head")
HASHES = ("o", "l", "h")
DRAFTS = TaskDrafts(TASK, "o", {"lookup": "l", "head": "h"}, {"lookup": 6})
SPEC = spec(tree={"topK": 4, "maxNodes": 16})
SHAPES = [TreeShape.parse(text) for text in ("none", "chain:3", "tree:3,2,1", "tree:2,2")]


def decision(cells: Sequence[CreditCell], shape: TreeShape = SHAPES[1]) -> tuple[LoadDecision, list[Option]]:
    """Return the decision for four sequences, and the subsets of both drafts."""
    load_state = LoadState(sequences=4, at=NOW)
    learned = LearnedState(acceptance=chances(0.6), costs=FULL, credit=tuple(cells), load=load_state)
    times, load = StepTimeModel.fit(FULL), Load(4, 500)
    row = RowState(concurrency=2, context=0, task=TASK, depth=0).running(shape)
    tasks = tasks_at(AcceptanceModel(learned, SPEC), [row], load, None)
    search = ShapeSearch(times, load, tasks, Objective())
    rule = LoadDecision(SPEC, learned, search, [row], NOW, is_suspended=False, is_present=True)
    bounds = {
        names: Bounds(0, 5, 3, 16, 4, ("eagle3", "eagle3") if "head" in names else ("eagle3",))
        for names in subsets_of(DECLARED)
    }
    return rule, options_of(rule, learned, Credit.of(learned, DRAFTS, DECLARED), bounds)


def counts(draft: str, *rates: float, total: float = 4000) -> list[CreditCell]:
    return [
        CreditCell(task=TASK, draft=draft, depth=depth, hits=rate * total, total=total, at=1000)
        for depth, rate in enumerate(rates, start=1)
    ]


def credit_of(head: float, common: float = 0.7, total: float = 4000) -> list[CreditCell]:
    """Return the credit of both drafts: the lookup has some, and the head as given."""
    own = [(COMMON, common), ("o", 0.5), ("h", head), ("l", 0.3)]
    return [cell for draft, rate in own for cell in counts(draft, rate, rate, rate, total=total)]


USELESS, USEFUL = credit_of(0.0), credit_of(0.85, common=0.9)


def known(**fields: object) -> MergeChoice:
    return all_declared(TASK, DECLARED, HASHES).model_copy(update=fields)


def stepped(choice: MergeChoice, cells: Sequence[CreditCell] | None = (), now: float = NOW) -> Step:
    rule, options = decision(cells or USELESS)
    return next_step(choice, options if cells else [], rule if cells is not None else None, now)


DROPPED = known(drafts=("lookup",), since=NOW - 3600, loss=0.1, reason="head dropped", moves=(NOW - 3600,))


def test_a_sure_gain_drops_a_draft() -> None:
    step = stepped(known(), USELESS)
    assert (step.because, step.choice.drafts, step.choice.since) == ("gain", ("lookup",), NOW)
    assert step.choice.moves == (NOW,)
    assert 0.05 < step.choice.loss < 1
    assert step.reason == step.choice.reason
    assert step.reason.startswith("head dropped: +0 % tokens for ")
    assert step.reason.endswith(" % longer steps, 100 % sure")


@pytest.mark.parametrize(
    ("choice", "cells"),
    [
        (known(), None),
        (known(), ()),
        (known(), USEFUL),
        (known(), credit_of(0.3, total=40)),
        (known(since=NOW - 59, moves=(NOW - 59,)), USELESS),
        (known(since=NOW - 100, moves=(NOW - 100,) * 6), USELESS),
    ],
    ids=["no traffic", "no credit", "a draft that helps", "not sure", "dwell", "changes of the hour"],
)
def test_otherwise_all_stay(choice: MergeChoice, cells: Sequence[CreditCell] | None) -> None:
    step = stepped(choice, cells)
    assert (step.because, step.choice) == (None, choice)


def test_dropped_drafts_are_tried_for_a_bounded_time() -> None:
    began = stepped(DROPPED)
    assert (began.because, began.choice.drafts, began.choice.before) == ("trial", DECLARED, ("lookup",))
    under_way = stepped(began.choice, now=NOW + TUNING.window_seconds - 1)
    assert (under_way.because, under_way.choice) == (None, began.choice)
    over = stepped(began.choice, None, now=NOW + TUNING.window_seconds)
    assert (over.because, over.choice.drafts, over.choice.before) == ("trial", ("lookup",), None)
    assert over.choice.reason == "head dropped"


def test_a_measured_trial_keeps_the_better_drafts() -> None:
    trial = stepped(DROPPED).choice
    whole = stepped(trial, USEFUL, NOW + 30)
    assert (whole.choice.drafts, whole.choice.before, whole.choice.reason, whole.choice.loss) == (DECLARED, None, "", 0)
    assert "kept: " in whole.reason
    again = stepped(trial, USELESS, NOW + 30)
    assert (again.because, again.choice.drafts) == ("trial", ("lookup",))
    assert again.choice.moves == trial.moves, "the end of a trial is no change of its own"


def test_the_more_a_draft_cost_the_later_it_is_tried_again() -> None:
    def first_trial(loss: float) -> float:
        waits = (60.0 * minutes for minutes in range(1, 600))
        dropped = (known(drafts=(), since=NOW - wait, loss=loss) for wait in waits)
        return next((NOW - choice.since for choice in dropped if stepped(choice).because), math.inf)

    assert stepped(DROPPED, None).because is None, "without traffic nothing is tried"
    assert 120 < first_trial(0.01) < first_trial(0.2) < first_trial(0.5) < math.inf


def test_other_drafts_begin_with_all_of_them() -> None:
    assert renewed(None, TASK, DECLARED, HASHES).choice == known()
    assert renewed(DROPPED, TASK, DECLARED, HASHES).choice == DROPPED
    assert renewed(DROPPED, TASK, DECLARED, ("", "", "")).choice == DROPPED, "no worker answers"
    for declared, hashes in ((DECLARED, ("d2", "l", "h")), (DECLARED, ("o", "l", "new")), (("head",), ("o", "h"))):
        step = renewed(DROPPED, TASK, declared, hashes)
        assert (step.because, step.choice.drafts, step.choice.since) == ("bounds", declared, 0)
        assert step.choice.moves == DROPPED.moves


# --- steps with every subset -------------------------------------------------------------------------------------


def test_a_head_without_credit_costs_its_passes_and_no_tokens() -> None:
    rule, options = decision(USELESS)
    both, lookup, head, none = options
    assert lookup.same.by_task[TASK] == pytest.approx(both.same.by_task[TASK], rel=0.01)
    assert lookup.same.seconds.mean < 0.9 * both.same.seconds.mean
    assert rule.bound(both.best, lookup.best, TUNING.z) > 0.05
    assert rule.search.moving_demand(both.same, lookup.same) == pytest.approx(1), "the drafts alone move the tokens"
    assert rule.bound(both.best, head.best, TUNING.z) < rule.bound(both.best, lookup.best, TUNING.z)
    assert none.same.by_task[TASK] < 0.9 * both.same.by_task[TASK]


def test_a_head_with_much_credit_is_worth_its_passes() -> None:
    cells = [*counts(COMMON, 0.9, 0.9, 0.9), *counts("o", 0.3, 0.3, 0.3), *counts("h", 0.85, 0.85, 0.85)]
    rule, (both, lookup, head, _) = decision([*cells, *counts("l", 0.05, 0.05, 0.05)])
    assert rule.search.gain(both.best, lookup.best) < -0.1
    assert rule.search.gain(both.best, head.best) > -0.1


def test_names_are_listed_in_one_phrase() -> None:
    assert [listed(names) for names in ((), ("a",), ("a", "b"))] == ["nothing", "a", "a and b"]
    assert gain_text(("a",), "kept", 0.5, 1.25, 0.9) == "a kept: +100 % tokens for 20 % shorter steps, 90 % sure"


any_cells = any_credit(TASK, [COMMON, "o", "h", "l"], ranks=3, size=10)
times = st.floats(0, 4e9)
choices = st.builds(
    MergeChoice,
    task=st.just(TASK),
    drafts=st.just(DECLARED),
    declared=st.just(DECLARED),
    hashes=st.just(HASHES),
    since=times,
    before=st.none() | st.sampled_from(subsets_of(DECLARED)),
    moves=st.lists(times, max_size=4).map(tuple),
    loss=st.floats(0, 1e9),
)


@given(any_cells, st.sampled_from(SHAPES), choices, times)
@settings(max_examples=40)
def test_any_input_gives_drafts_of_the_spec_and_the_same_ones_again(
    cells: list[CreditCell], shape: TreeShape, choice: MergeChoice, now: float
) -> None:
    rule, options = decision(cells, shape)
    assert [option.names for option in options] == subsets_of(DECLARED)
    now_best = options[0].best
    gains = [(rule.search.gain(now_best, one.best), rule.search.gain_error(now_best, one.best)) for one in options]
    assert all(math.isfinite(gain) and error >= 0 for gain, error in gains)
    step = next_step(choice, options, rule, now)
    assert set(step.choice.drafts) <= set(DECLARED)
    assert step == next_step(choice, options, rule, now)
    if step.because is None:
        assert step.choice == choice
    else:
        assert step.choice.since == now
