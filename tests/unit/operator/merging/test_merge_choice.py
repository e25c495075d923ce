"""The rule for merged drafts: never outside of the spec, sure of a gain, and dropped drafts are tried again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.api.v1alpha1 import STABILITY
from specdecode_operator.merging.choice import Limits, all_declared, next_step, renewed, retry_seconds
from specdecode_operator.merging.options import Option
from specdecode_operator.merging.subsets import subsets_of
from specdecode_operator.merging.tuning import TUNING
from specdecode_operator.state.learned import MergeChoice

NOW = 10_000.0
DECLARED = ("lookup", "head")
HASHES = ("d1", "l", "h")
LIMITS = Limits(stability=STABILITY["Medium"], explore=0.01)
WHOLE = Option(DECLARED, 0.0, 0.0, 1.0, 1.0)


def fewer(gain: float, error: float = 0.01, names: tuple[str, ...] = ("lookup",)) -> Option:
    return Option(names, gain, error, 1.0, math.exp(-gain))


def known(**fields: object) -> MergeChoice:
    return all_declared("edits", DECLARED, HASHES).model_copy(update=fields)


DROPPED = known(drafts=("lookup",), since=NOW - 700, loss=0.1, reason="head dropped", moves=(NOW - 700,))


def test_a_sure_gain_drops_a_draft() -> None:
    step = next_step(known(), [WHOLE, fewer(0.1)], LIMITS, NOW)
    assert (step.because, step.choice.drafts, step.choice.since) == ("gain", ("lookup",), NOW)
    assert step.choice.moves == (NOW,)
    assert step.choice.loss == pytest.approx(math.expm1(0.1))


@pytest.mark.parametrize(
    ("choice", "options", "limits"),
    [
        (known(), None, LIMITS),
        (known(), [WHOLE, fewer(0.1, error=0.06)], LIMITS),
        (known(), [WHOLE, fewer(0.04)], LIMITS),
        (known(since=NOW - 59, moves=(NOW - 59,)), [WHOLE, fewer(0.1)], LIMITS),
        (known(since=NOW - 100, moves=(NOW - 100,) * 6), [WHOLE, fewer(0.1)], LIMITS),
    ],
    ids=["no data", "not sure", "too little", "dwell", "changes of the hour"],
)
def test_otherwise_all_stay(choice: MergeChoice, options: list[Option] | None, limits: Limits) -> None:
    step = next_step(choice, options, limits, NOW)
    assert (step.because, step.choice) == (None, choice)


def test_a_task_with_few_tokens_needs_a_gain_of_its_share() -> None:
    limits = Limits(stability=STABILITY["Medium"], explore=0.01, demand=0.1)
    assert next_step(known(), [WHOLE, fewer(0.01, error=0.002)], limits, NOW).because == "gain"


def test_dropped_drafts_are_tried_for_a_bounded_time() -> None:
    began = next_step(DROPPED, None, LIMITS, NOW)
    assert (began.because, began.choice.drafts, began.choice.before) == ("trial", DECLARED, ("lookup",))
    under_way = next_step(began.choice, None, LIMITS, NOW + TUNING.trial_seconds - 1)
    assert (under_way.because, under_way.choice) == (None, began.choice)
    over = next_step(began.choice, None, LIMITS, NOW + TUNING.trial_seconds)
    assert (over.because, over.choice.drafts, over.choice.before) == ("trial", ("lookup",), None)
    assert over.choice.reason == "head dropped"


def test_a_measured_trial_keeps_the_better_drafts() -> None:
    trial = next_step(DROPPED, None, LIMITS, NOW).choice
    whole = next_step(trial, [WHOLE, fewer(-0.05)], LIMITS, NOW + 30).choice
    assert (whole.drafts, whole.before, whole.reason, whole.loss) == (DECLARED, None, "", 0.0)
    again = next_step(trial, [WHOLE, fewer(0.02)], LIMITS, NOW + 30)
    assert (again.because, again.choice.drafts) == ("trial", ("lookup",))
    assert again.choice.moves == trial.moves, "the end of a trial is no change of its own"


def test_a_trial_waits_for_traffic_and_costs_no_more_than_exploration() -> None:
    idle = Limits(stability=STABILITY["Medium"], explore=0.01, is_active=False)
    assert next_step(DROPPED, None, idle, NOW).because is None
    assert retry_seconds(0.5, LIMITS) == pytest.approx(3000)
    assert retry_seconds(0.01, LIMITS) == TUNING.retry_seconds
    assert retry_seconds(0.01, Limits(stability=STABILITY["Medium"], explore=0.0)) == math.inf


def test_other_drafts_begin_with_all_of_them() -> None:
    assert renewed(None, "edits", DECLARED, HASHES).choice == known()
    assert renewed(DROPPED, "edits", DECLARED, HASHES).choice == DROPPED
    assert renewed(DROPPED, "edits", DECLARED, ("", "", "")).choice == DROPPED, "no worker answers"
    for declared, hashes in ((DECLARED, ("d2", "l", "h")), (DECLARED, ("d1", "l", "new")), (("head",), ("d1", "h"))):
        step = renewed(DROPPED, "edits", declared, hashes)
        assert (step.because, step.choice.drafts, step.choice.since) == ("bounds", declared, 0)
        assert step.choice.moves == DROPPED.moves


finite = st.floats(allow_nan=False, allow_infinity=False)
times = st.floats(0, 4e9)
drafts = st.sampled_from(subsets_of(DECLARED))
options = st.lists(
    st.builds(Option, drafts, finite, st.floats(0, 1e9), st.floats(0.01, 100), st.floats(0.01, 100)), max_size=4
)
choices = st.builds(
    MergeChoice,
    task=st.just("edits"),
    drafts=drafts,
    declared=st.just(DECLARED),
    hashes=st.just(HASHES),
    since=times,
    before=st.none() | drafts,
    moves=st.lists(times, max_size=4).map(tuple),
    loss=st.floats(0, 1e9),
)
limits_of = st.builds(
    Limits,
    stability=st.just(STABILITY["Medium"]),
    explore=st.floats(0, 0.5),
    demand=st.floats(0, 1),
    is_active=st.booleans(),
)


@given(choices, st.none() | options, limits_of, times)
def test_any_input_gives_drafts_of_the_spec_and_the_same_ones_again(
    choice: MergeChoice, options: list[Option] | None, limits: Limits, now: float
) -> None:
    step = next_step(choice, options, limits, now)
    assert set(step.choice.drafts) <= set(DECLARED)
    assert step == next_step(choice, options, limits, now)
    if step.because is None:
        assert step.choice == choice
    else:
        assert step.choice.since == now
