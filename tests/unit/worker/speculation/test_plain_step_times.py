"""Tests of the scaling of step times to the edge of a bucket."""

from __future__ import annotations

import pytest

from specdecode_worker.control.plan import PlainStepTimes


@pytest.fixture
def step_times() -> PlainStepTimes:
    step_times = PlainStepTimes()
    for sequences, seconds in ((4, 0.04), (1, 0.02), (2, 0.03)):
        step_times.learn(sequences, seconds)
    return step_times


@pytest.mark.parametrize(
    ("sequences", "edge", "factor"),
    [(4, 4, 1.0), (3, 4, 40 / 35), (2, 4, 40 / 30), (8, 4, 40 / 60), (4, 16, 100 / 40)],
)
def test_step_times_are_interpolated_linearly(
    step_times: PlainStepTimes, sequences: int, edge: int, factor: float
) -> None:
    assert step_times.scaled(0.5, sequences, edge) == pytest.approx(0.5 * factor)


def test_fewer_than_two_points_scale_nothing() -> None:
    step_times = PlainStepTimes()
    assert step_times.scaled(0.5, 3, 4) == 0.5
    step_times.learn(1, 0.02)
    assert step_times.scaled(0.5, 3, 4) == 0.5


def test_negative_extrapolation_scales_nothing(step_times: PlainStepTimes) -> None:
    falling = PlainStepTimes()
    falling.learn(1, 0.02)
    falling.learn(2, 0.01)
    assert falling.scaled(0.5, 2, 4) == 0.5


def test_newer_time_replaces_the_older(step_times: PlainStepTimes) -> None:
    step_times.learn(4, 0.08)
    assert step_times.scaled(1.0, 2, 4) == pytest.approx(8 / 3)
