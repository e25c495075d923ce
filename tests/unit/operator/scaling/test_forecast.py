"""Forecast of the arrival rate: season, trend and gaps."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specdecode_operator.scaling import TUNING, forecast_rate, update_forecast
from specdecode_operator.state.learned import ForecastState


def days(rate_at: Any, count: float, state: ForecastState | None = None) -> tuple[ForecastState, float]:
    state, now = state or ForecastState(), 0.0
    while now < 86400 * count:
        now += TUNING.sample_seconds
        state = update_forecast(state, rate_at(now) * TUNING.sample_seconds, TUNING.sample_seconds, now=now)
    return state, now


def test_the_season_of_earlier_days_is_forecast() -> None:
    def daily(now: float) -> float:
        return 9.0 if 9 * 3600 <= now % 86400 < 18 * 3600 else 1.0

    state, now = days(daily, 2 + 8.75 / 24)
    soon, later = (forecast_rate(state, now=now, ahead_seconds=ahead) for ahead in (60, 1200))
    assert soon < 2
    assert later > 6


def test_a_ramp_is_carried_on_and_noise_is_not() -> None:
    ramp, now = days(lambda now: 1 + now / 600, 1 / 24)
    assert forecast_rate(ramp, now=now, ahead_seconds=300) > ramp.level
    noise, now = days(lambda now: 5 + 4 * (int(now / 60) % 2), 1 / 24)
    assert forecast_rate(noise, now=now, ahead_seconds=300) < 9


def test_after_a_long_gap_there_is_no_forecast() -> None:
    state, now = days(lambda now: 5.0, 0.1)
    assert forecast_rate(state, now=now + 5000, ahead_seconds=60) == 0


@given(st.lists(st.tuples(st.floats(-10, 1e9), st.floats(-1, 1e5), st.floats(0, 1e6)), max_size=30), st.floats(0, 1e5))
def test_any_arrivals_have_a_forecast(seen: list[tuple[float, float, float]], ahead: float) -> None:
    state = ForecastState()
    for arrivals, seconds, now in seen:
        state = update_forecast(state, arrivals, seconds, now=now)
        assert math.isfinite(forecast_rate(state, now=now, ahead_seconds=ahead))
        assert forecast_rate(state, now=now, ahead_seconds=ahead) >= 0
