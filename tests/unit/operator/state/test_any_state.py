"""Any learned state survives the round trip through its text, and no damage of the text raises."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from specdecode_operator.state.cells import CreditCell, MergeChoice
from specdecode_operator.state.learned import (
    AcceptanceCell,
    DraftEstimates,
    LearnedState,
    PodState,
    PodTaskState,
    RequestCell,
    RowState,
    StepTimeCell,
    TrafficCell,
    parse_state,
    read_state,
    render_state,
)
from support.operators.crowd import Crowd, same

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


def drafted(cells: tuple[StepTimeCell, ...]) -> tuple[StepTimeCell, ...]:
    return tuple(cell for cell in cells if cell.draft_passes)


estimates = st.builds(
    DraftEstimates,
    draft=drafts,
    acceptance=many(acceptance_records),
    requests=many(request_records),
    costs=many(cell_records).map(drafted),
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


def by_kind(cells: tuple[StepTimeCell, ...]) -> list[StepTimeCell]:
    return sorted(
        cells,
        key=lambda cell: (
            cell.tokens_bucket,
            cell.draft_passes,
            cell.prefill,
            cell.context_bucket,
            cell.at,
            cell.values,
        ),
    )


@pytest.mark.slow
@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])
@given(states)
def test_any_state_survives_the_round_trip(learned: LearnedState) -> None:
    parked = tuple(one for one in learned.parked if one.draft != learned.draft)
    learned = learned.model_copy(update={"parked": parked})
    data = render_state(learned)
    stored = parse_state(data, "u")
    assert stored is not None
    assert same(by_kind(stored.costs), by_kind(learned.costs))
    assert same(stored, learned.model_copy(update={"costs": stored.costs}))
    assert all(len(key) <= 253 and key.replace(".", "").replace("-", "").replace("_", "").isalnum() for key in data)


WRITTEN = render_state(Crowd().learned(pods=1))


@pytest.mark.slow
@settings(max_examples=50, phases=[Phase.explicit, Phase.generate])
@given(st.sampled_from(sorted(WRITTEN)), st.randoms(use_true_random=False))
def test_no_damage_raises(key: str, chance: random.Random) -> None:
    data = dict(WRITTEN)
    text = list(data[key])
    for _ in range(3):
        text[chance.randrange(len(text))] = chance.choice('{}[]",:0aZ=')
    data[key] = "".join(text)
    read_state(data, "u", is_owned=True)
