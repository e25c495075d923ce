"""Canary test: validity of its evidence, verdicts, the veto of a task, and the difference of a pair."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.drafts.crossover import (
    CellKey,
    Cost,
    Crossover,
    CrossoverTuning,
    Evidence,
    Verdict,
    increments,
    pair_difference,
    task_differences,
)
from specdecode_worker.contract import candidate_first

TUNING = CrossoverTuning()
CODE, PROSE = CellKey("code", 2, 0), CellKey("prose", 2, 0)


def run(differences: list[float], **tasks: list[float]) -> Verdict:
    """Return the first verdict over the differences."""
    state = Crossover()
    for index, value in enumerate(differences):
        state = state.add(value, {name: values[index] for name, values in tasks.items()}, TUNING)
        verdict = state.verdict(TUNING)
        if verdict is not Verdict.CONTINUE:
            return verdict
    return Verdict.CONTINUE


@given(size=st.floats(0, 1e3), shift=st.floats(0, 1e3))
def test_evidence_has_a_mean_of_at_most_one_for_every_symmetric_distribution(size: float, shift: float) -> None:
    """Two points around zero or less are enough: every symmetric distribution is a mixture of such pairs."""
    pairs = zip(increments(size - shift), increments(-size - shift), strict=True)
    for up, down in pairs:
        assert (math.exp(up) + math.exp(down)) / 2 <= 1 + 1e-12


def test_the_scale_of_a_difference_comes_from_earlier_pairs_only() -> None:
    """A scale that used the difference itself would bias the evidence of large ones."""
    first = Evidence().add(0.08, 0.0)
    assert first.above == pytest.approx(increments(0.08 / 0.1))
    quiet, loud = (Evidence().add(size, 0.0).add(0.05, 0.0) for size in (0.01, 5.0))
    gain_quiet, gain_loud = (after.above[2] - increments(size / 0.1)[2] for after, size in ((quiet, 0.01), (loud, 5.0)))
    assert gain_quiet > gain_loud


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [(0.10, Verdict.PROMOTE), (-0.05, Verdict.ROLL_BACK), (0.0, Verdict.UNDECIDED), (0.01, Verdict.UNDECIDED)],
    ids=["faster", "slower", "equal", "below the least gain"],
)
def test_verdicts_follow_the_gain(gain: float, verdict: Verdict) -> None:
    coins = random.Random(1)
    assert run([math.log1p(gain) + coins.gauss(0, 0.04) for _ in range(120)]) is verdict


def test_a_lost_task_is_never_promoted_over() -> None:
    """The whole gains much, and one small task loses: the candidate is rolled back for that task."""
    coins = random.Random(3)
    code = [0.15 + coins.gauss(0, 0.04) for _ in range(120)]
    prose = [-0.25 + coins.gauss(0, 0.1) for _ in range(120)]
    whole = [0.9 * one + 0.1 * other for one, other in zip(code, prose, strict=True)]
    assert run(whole) is Verdict.PROMOTE
    assert run(whole, code=code, prose=prose) is Verdict.ROLL_BACK


def test_a_task_without_evidence_holds_the_promotion_back() -> None:
    state = Crossover()
    for index in range(30):
        state = state.add(0.1, {"code": 0.1, **({"rare": 0.1} if index == 0 else {})}, TUNING)
    assert state.vetoes(TUNING) == ("rare",)
    assert state.verdict(TUNING) is Verdict.CONTINUE


def test_the_difference_of_a_pair_compares_cells_that_both_have() -> None:
    incumbent = {CODE: Cost(2.0, 100), PROSE: Cost(9.0, 100)}
    candidate = {CODE: Cost(1.0, 100), CellKey("code", 5, 0): Cost(50.0, 10)}
    assert pair_difference(incumbent, candidate) == pytest.approx(math.log(2))
    assert pair_difference(incumbent, {}) is None
    assert pair_difference({CODE: Cost(0.0, 0)}, candidate) is None
    assert task_differences(incumbent, candidate, ("code", "prose")) == {"code": pytest.approx(math.log(2))}


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(1, 1e4)), min_size=3, max_size=3),
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(1, 1e4)), min_size=3, max_size=3),
)
def test_exchanged_blocks_have_the_opposite_difference(
    one: list[tuple[float, float]], other: list[tuple[float, float]]
) -> None:
    """Without this, the difference of two equal drafts would not be symmetric, and the evidence not valid."""
    first, second = ({CellKey("t", i, 0): Cost(*cost) for i, cost in enumerate(block)} for block in (one, other))
    forward, backward = pair_difference(first, second), pair_difference(second, first)
    assert backward == pytest.approx(-forward, abs=1e-9)


def test_the_order_of_a_pair_is_a_fair_coin_that_a_restart_repeats() -> None:
    tosses = [candidate_first("trial", pair) for pair in range(2000)]
    assert tosses == [candidate_first("trial", pair) for pair in range(2000)]
    assert 900 < sum(tosses) < 1100
    assert tosses != [candidate_first("other", pair) for pair in range(2000)]
