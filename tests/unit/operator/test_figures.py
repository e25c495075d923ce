"""SPEEDUP is of everything that decoded: what a guard holds back, and what exploration costs, are in it."""

from __future__ import annotations

import pytest

from specdecode_operator.planning.figures import speedup
from specdecode_operator.telemetry.counters import CellKey, Moments
from specdecode_worker.contract import FEATURES

SEQUENCES = 4.0
PLAIN_SECONDS = 0.01
XX = len(FEATURES) * (len(FEATURES) + 1) // 2


def steps(passes: int, count: float, seconds: float, tokens: float) -> tuple[CellKey, Moments]:
    """``count`` steps of ``SEQUENCES`` sequences, each taking ``seconds`` and emitting ``tokens`` a sequence."""
    x = {"one": 1.0, "sequences": SEQUENCES, "verify_tokens": SEQUENCES * (1 + passes), "draft_passes": float(passes)}
    sums = [count * x.get(name, 0.0) for name in FEATURES]
    times = (count, count * seconds, count * seconds**2, count * SEQUENCES * tokens)
    moments = Moments((*times, *sums, *(value * seconds for value in sums), *(0.0,) * XX))
    return CellKey(int(SEQUENCES) * (1 + passes), passes, False, 0), moments


PLAIN = steps(0, 1000, PLAIN_SECONDS, 1.0)


def test_steps_of_a_shape_are_held_against_plain_ones() -> None:
    found = speedup(dict([steps(3, 1000, 0.016, 2.0), steps(0, 10, PLAIN_SECONDS, 1.0)]), ())
    assert found == pytest.approx(2 * PLAIN_SECONDS / 0.016, rel=0.01)


def test_bursts_say_nothing_where_the_guard_runs_plainly() -> None:
    """A shape that loses a fifth, in one step of a hundred: nobody was served faster, and nobody slower by much."""
    assert speedup(dict([PLAIN, steps(3, 10, 0.025, 2.0)]), ()) == pytest.approx(1.0, abs=0.01)
    assert speedup(dict([PLAIN, steps(5, 10, 0.01, 3.0)]), ()) == pytest.approx(1.02, abs=0.01)


def test_shadows_count_as_what_they_cost() -> None:
    key, moments = steps(0, 1000, 1.25 * PLAIN_SECONDS, 1.0)
    shadowed = key._replace(draft_passes=3), moments
    assert speedup(dict([PLAIN, shadowed]), ()) == pytest.approx(2 / 2.25, rel=0.01)


def test_little_is_no_figure() -> None:
    assert speedup(dict([steps(3, 20, 0.016, 2.0), steps(0, 20, PLAIN_SECONDS, 1.0)]), ()) is None


def test_no_figure_where_most_has_nothing_to_be_compared_with() -> None:
    """Plain steps of another context compare with themselves, and would say 1."""
    key, moments = steps(3, 1000, 0.016, 2.0)
    elsewhere = key._replace(context_bucket=2), moments
    assert speedup(dict([PLAIN, elsewhere]), ()) is None
