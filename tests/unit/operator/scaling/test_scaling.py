"""Replicas that follow demand: up on two polls, down after the window and one by one, always within bounds."""

from __future__ import annotations

from collections.abc import Container

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.api.v1alpha1 import ScalingSpec
from specdecode_operator.scaling import Demand, scale
from specdecode_operator.state.learned import ScalingState

SPEC = ScalingSpec(min_replicas=1, max_replicas=4, scale_down_window="60s")


def polls(
    demands: list[float], state: ScalingState | None = None, *, trusted: bool = True, away: Container[int] = ()
) -> list[int]:
    """Return the replicas after each poll, five seconds apart. One worker carries 8 of its 10 sequences. In the polls
    ``away`` a worker is missing."""
    state, replicas = state or ScalingState(), []
    for index, demand in enumerate(demands):
        there = trusted and index not in away
        asked = Demand(requests=demand, window_requests=demand, max_num_seqs=10, seconds=5, is_complete=there)
        state, _ = scale(SPEC, state, asked, now=1000.0 + 5 * index)
        replicas.append(state.replicas)
    return replicas


@pytest.mark.parametrize(
    ("demands", "start", "replicas"),
    [
        ([20] * 2, None, [1, 3]),
        ([20, 4, 20, 4], None, [1] * 4),
        ([0] * 16, 3, [3] * 12 + [2] + [1] * 3),
        ([0] * 11 + [20] + [0] * 12, 3, [3] * 24),
        # 20 requests need three workers: a dip at the end of the window is not what the workers must carry.
        ([20] * 12 + [4] * 20, 4, [4] * 12 + [3] * 12 + [2] + [1] * 7),
        ([4] * 6 + [12] * 6 + [4] * 20, 4, [4] * 12 + [3] + [2] * 11 + [1] * 8),
    ],
    ids=[
        "up on the second poll",
        "one poll is not enough",
        "down one by one after the window",
        "a peak within the window starts it again",
        "no further down than the highest need within the window",
        "a need that rises within the window is the highest",
    ],
)
def test_replicas_follow_the_demand(demands: list[float], start: int | None, replicas: list[int]) -> None:
    assert polls(demands, ScalingState(replicas=start)) == replicas


def test_the_window_begins_anew_after_a_time_that_nobody_watched() -> None:
    """The operator was away for ten minutes: what it remembers says nothing of the demand meanwhile."""
    replicas = polls([0.0] * 14, ScalingState(replicas=4, below_since=0.0, low_needs=((400.0, 3),)))
    assert replicas == [4] * 12 + [3, 2]
    seen = ScalingState(replicas=4, below_since=0.0, low_needs=((950.0, 1),))
    assert polls([0.0], seen) == [3], "a minute away is none"


def test_the_remembered_needs_are_few() -> None:
    state = ScalingState(replicas=4)
    for index in range(500):
        demand = Demand(requests=index % 17, window_requests=index % 17, max_num_seqs=10, seconds=5, is_complete=True)
        state, _ = scale(SPEC, state, demand, now=1000.0 + 5 * index)
        assert len(state.low_needs) <= 3
        assert list(state.low_needs) == sorted(state.low_needs, key=lambda need: -need[1])


def test_the_window_starts_when_all_workers_serve() -> None:
    """Otherwise a worker that took as long as the window to start would be removed as soon as it is ready."""
    replicas = polls([0.0] * 39, ScalingState(replicas=3), away=range(4, 30))
    assert replicas == [3] * 38 + [2], "12 polls fill the window: 3 after the first one, and 9 once all workers serve"


def test_no_new_reading_changes_nothing() -> None:
    state = ScalingState(replicas=2, above_polls=1, wanted=3)
    assert scale(SPEC, state, Demand(requests=None), now=0) == (state, "")


def test_wanted_has_no_bound() -> None:
    demand = Demand(requests=100, window_requests=100, max_num_seqs=10)
    scaled, _ = scale(SPEC, ScalingState(replicas=4), demand, now=0)
    assert (scaled.replicas, scaled.wanted) == (4, 13)


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=40),
    st.one_of(st.none(), st.integers(0, 2000)),
    st.booleans(),
)
def test_within_bounds_for_any_input(demands: list[float], start: int | None, trusted: bool) -> None:
    assert all(1 <= one <= 4 for one in polls(demands, ScalingState(replicas=start), trusted=trusted))


@given(st.floats(0, 200))
def test_constant_demand_reaches_a_fixed_point(demand: float) -> None:
    replicas = polls([demand] * 80)
    assert len(set(replicas[60:])) == 1
