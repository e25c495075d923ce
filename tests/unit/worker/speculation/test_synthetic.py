"""Tests of the synthetic knobs: accepted paths are only shortened, and steps are only lengthened."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.contract import StepTime, SyntheticKnobs
from specdecode_worker.engine.target import Synthetic

PROFILES = st.lists(st.floats(0, 1), min_size=1, max_size=5).map(tuple)


@given(PROFILES, st.integers(0, 16), st.integers(0, 1000))
def test_a_profile_only_truncates(profile: tuple[float, ...], depth: int, seed: int) -> None:
    synthetic = Synthetic(SyntheticKnobs(acceptance=profile), seed)
    assert all(0 <= synthetic.draw_depth_limit(depth) <= depth for _ in range(10))


@pytest.mark.parametrize(
    "knobs", [None, SyntheticKnobs(), SyntheticKnobs(acceptance=()), SyntheticKnobs(acceptance=(1,))]
)
def test_nothing_is_cut_without_an_acceptance_below_one(knobs: SyntheticKnobs | None) -> None:
    assert all(Synthetic(knobs).draw_depth_limit(depth) == depth for depth in range(17))


def test_only_a_profile_cuts() -> None:
    assert not Synthetic().cuts
    assert not Synthetic(SyntheticKnobs(step_time=(StepTime(seconds=1),))).cuts
    assert Synthetic(SyntheticKnobs(acceptance=(1.0,))).cuts


def test_zero_acceptance_always_cuts_at_its_depth() -> None:
    synthetic = Synthetic(SyntheticKnobs(acceptance=(1.0, 1.0, 0.0, 1.0)))
    assert [synthetic.draw_depth_limit(depth) for depth in range(6)] == [0, 1, 2, 2, 2, 2]


def test_each_depth_has_its_acceptance_and_the_last_entry_repeats() -> None:
    synthetic = Synthetic(SyntheticKnobs(acceptance=(0.9, 0.5)), seed=5)
    depths = [synthetic.draw_depth_limit(4) for _ in range(20_000)]
    reached = [sum(depth >= level for depth in depths) for level in range(5)]
    chances = [after / before for before, after in pairwise(reached)]
    assert chances == pytest.approx([0.9, 0.5, 0.5, 0.5], abs=0.02)


def test_a_task_has_a_profile_of_its_own() -> None:
    synthetic = Synthetic(SyntheticKnobs(acceptance=(1.0, 0.0), task_acceptance={"prose": (0.0,), "code": ()}))
    assert synthetic.cuts
    assert (
        synthetic.draw_depth_limit(4),
        synthetic.draw_depth_limit(4, "prose"),
        synthetic.draw_depth_limit(4, "code"),
    ) == (1, 0, 4)
    alone = Synthetic(SyntheticKnobs(task_acceptance={"prose": (0.0,)}))
    assert alone.cuts
    assert (alone.draw_depth_limit(4), alone.draw_depth_limit(4, "prose")) == (4, 0)


STEPS = (
    StepTime(max_sequences=1, max_nodes=0, seconds=0.1),
    StepTime(max_sequences=4, max_context=100, seconds=0.2),
    StepTime(seconds=0.3),
)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [((1, 0, 5000), 0.1), ((1, 1, 100), 0.2), ((4, 9, 100), 0.2), ((4, 9, 101), 0.3), ((5, 0, 1), 0.3)],
)
def test_a_step_is_padded_by_the_first_matching_row(size: tuple[int, int, int], seconds: float) -> None:
    assert Synthetic(SyntheticKnobs(step_time=STEPS)).least_seconds(*size) == seconds


def test_a_step_without_a_matching_row_is_not_padded() -> None:
    assert Synthetic(SyntheticKnobs(step_time=STEPS[:2])).least_seconds(9, 9, 9) == 0
    assert Synthetic().least_seconds(9, 9, 9) == 0


def test_knobs_of_a_draft_replace_the_others_while_it_runs() -> None:
    slow = SyntheticKnobs(step_time=(StepTime(seconds=0.5),), task_acceptance={"prose": (0.0,)})
    synthetic = Synthetic(SyntheticKnobs(step_time=STEPS, by_draft={"new": slow}))
    assert synthetic.cuts
    assert (synthetic.draw_depth_limit(4, "prose", "new"), synthetic.draw_depth_limit(4, "prose", "old")) == (0, 4)
    assert synthetic.least_seconds(1, 0, 1, ["old", "old"]) == 0.1
    assert synthetic.least_seconds(1, 0, 1, ["old", "new"]) == 0.5
