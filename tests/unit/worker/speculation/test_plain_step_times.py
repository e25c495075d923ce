"""Tests of the scaling of step times to the edge of a bucket."""

from __future__ import annotations

import pytest

from specdecode_worker.speculation.plain_step_times import PlainCurve


@pytest.fixture
def curve() -> PlainCurve:
    curve = PlainCurve()
    for sequences, seconds in ((4, 0.04), (1, 0.02), (2, 0.03)):
        curve.learn(sequences, seconds)
    return curve


@pytest.mark.parametrize(
    ("sequences", "edge", "factor"),
    [(4, 4, 1.0), (3, 4, 40 / 35), (2, 4, 40 / 30), (8, 4, 40 / 60), (4, 16, 100 / 40)],
)
def test_lines_through_what_was_timed(curve: PlainCurve, sequences: int, edge: int, factor: float) -> None:
    assert curve.scaled(0.5, sequences, edge) == pytest.approx(0.5 * factor)


def test_nothing_is_scaled_without_two_loads() -> None:
    curve = PlainCurve()
    assert curve.scaled(0.5, 3, 4) == 0.5
    curve.learn(1, 0.02)
    assert curve.scaled(0.5, 3, 4) == 0.5


def test_a_line_that_falls_below_nothing_scales_nothing(curve: PlainCurve) -> None:
    falling = PlainCurve()
    falling.learn(1, 0.02)
    falling.learn(2, 0.01)
    assert falling.scaled(0.5, 2, 4) == 0.5


def test_a_load_that_is_timed_again_is_the_newer(curve: PlainCurve) -> None:
    curve.learn(4, 0.08)
    assert curve.scaled(1.0, 2, 4) == pytest.approx(8 / 3)
