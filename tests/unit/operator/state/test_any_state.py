"""Any learned state survives the round trip through its text, and no damage of the text raises."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from specdecode_operator.state.learned import (
    AcceptanceCell,
    CreditCell,
    DraftEstimates,
    LearnedState,
    MergeChoice,
    PodState,
    PodTaskState,
    RequestCell,
    RowState,
    StepTimeCell,
    TrafficCell,
    parse_state,
    render_state,
)
from support.operators.crowd import Crowd

numbers = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.floats(0, 2e9) | st.just(0.0)
names = st.text(max_size=12)
drafts = st.text(max_size=70)
cell_records = st.builds(
    StepTimeCell,
    tokens_bucket=st.integers(0, 4096),
    draft_passes=st.integers(0, 9),
    prefill=st.booleans(),
    context_bucket=st.integers(0, 3),
    values=st.just(()) | st.lists(numbers, min_size=37, max_size=37).map(tuple),
    new_values=st.just(()) | st.lists(numbers, max_size=3).map(tuple),
    at=numbers,
    made_up=numbers,
)
acceptance_records = st.builds(
    AcceptanceCell,
    task=names,
    depth=st.integers(1, 16),
    hits=numbers,
    total=numbers,
    at=numbers,
    parent=st.sampled_from(["main", "sibling"]),
    ranks=st.lists(numbers, max_size=8).map(tuple),
)
credit_records = st.builds(
    CreditCell, task=names, draft=drafts, depth=st.integers(1, 16), hits=numbers, total=numbers, at=numbers
)
merge_records = st.builds(
    MergeChoice,
    task=names,
    drafts=st.lists(names, max_size=2).map(tuple),
    declared=st.lists(names, max_size=2).map(tuple),
    before=st.none() | st.lists(names, max_size=2).map(tuple),
    since=numbers,
    loss=numbers,
    moves=st.lists(numbers, max_size=4).map(tuple),
)
row_records = st.builds(
    RowState,
    concurrency=st.integers(0, 10),
    context=st.integers(0, 2),
    task=names,
    depth=st.integers(0, 16),
    since=numbers,
    parents=st.lists(st.integers(0, 5), max_size=6).map(tuple),
    moves=st.lists(numbers, max_size=4).map(tuple),
    stays=st.booleans(),
)
request_records = st.builds(RequestCell, task=names, sums=st.tuples(*[numbers] * 6))


def many(records: Any) -> Any:
    return st.lists(records, max_size=12).map(tuple)


estimates = st.builds(
    DraftEstimates,
    draft=drafts,
    acceptance=many(acceptance_records),
    requests=many(request_records),
    costs=many(cell_records),
    rows=many(row_records),
)
states = st.builds(
    LearnedState,
    uid=st.just("u"),
    draft=drafts,
    rows=many(row_records),
    acceptance=many(acceptance_records),
    requests=many(request_records),
    credit=many(credit_records),
    merges=many(merge_records),
    costs=many(cell_records),
    traffic=many(st.builds(TrafficCell, task=names, sums=st.tuples(*[numbers] * 5))),
    prefill=st.just(()) | st.lists(numbers, min_size=37, max_size=37).map(tuple),
    wander=numbers,
    pods=many(
        st.builds(PodState, uid=names, pace=st.none() | numbers, tasks=many(st.builds(PodTaskState, task=names)))
    ),
    recycled_at=st.none() | numbers,
    pin=names,
    parked=st.lists(estimates, max_size=4, unique_by=lambda one: one.draft).map(tuple),
)


@pytest.mark.slow
@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])
@given(states)
def test_any_state_survives_the_round_trip(learned: LearnedState) -> None:
    assert parse_state(render_state(learned), "u", learned.plan) == learned


WRITTEN = render_state(Crowd().learned(pods=1))


@pytest.mark.slow
@settings(max_examples=50, phases=[Phase.explicit, Phase.generate])
@given(st.randoms(use_true_random=False))
def test_no_damage_raises_but_a_value_error(chance: random.Random) -> None:
    ((key, written),) = WRITTEN.items()
    text = list(written)
    for _ in range(3):
        text[chance.randrange(len(text))] = chance.choice('{}[]",:0aZ=')
    with contextlib.suppress(ValueError):
        parse_state({key: "".join(text)}, "u")
