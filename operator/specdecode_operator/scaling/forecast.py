"""Forecast of the arrival rate at the time when a new worker would be ready.

The method is a small relative of Holt-Winters. The season is the arrival rate at this time of day on earlier days; the
level and the damped trend describe the last minutes. The forecast less its own error may raise the lower bound of the
replicas; it never lowers it.
"""

from __future__ import annotations

from specdecode_operator.scaling.tuning import TUNING
from specdecode_operator.state.learned import ForecastState

DAY_SECONDS = 86400.0
SLOTS = 48
"""Parts of a day with a season of their own, half an hour each; they are stored in a ConfigMap."""
_UNKNOWN = -1.0
"""Season of a part of the day that was not measured yet."""


def update_forecast(state: ForecastState, arrivals: float, seconds: float, *, now: float) -> ForecastState:
    """Return ``state`` with the ``arrivals`` of the last ``seconds`` added."""
    pending = state.model_copy(
        update={"arrivals": state.arrivals + max(0.0, arrivals), "seconds": state.seconds + max(0.0, seconds)}
    )
    if pending.seconds < TUNING.sample_seconds:
        return pending
    return _with_sample(pending, pending.arrivals / pending.seconds, now)


def forecast_rate(state: ForecastState, *, now: float, ahead_seconds: float) -> float:
    """Return the arrivals per second ``ahead_seconds`` from now, less the mean error of such forecasts.

    Return 0 while there is no recent sample.
    """
    if state.at is None or now - state.at > TUNING.gap_seconds:
        return 0.0
    extrapolated = state.level + state.trend * min(ahead_seconds, TUNING.damping_seconds)
    season_then, season_now = _season(state, now + ahead_seconds), _season(state, now)
    if season_then is None or season_now is None:
        return max(0.0, extrapolated - state.error)
    remaining = max(0.0, 1 - ahead_seconds / TUNING.relapse_seconds)
    seasonal = season_then + (state.level - season_now) * remaining
    bound = max(state.level, 2 * season_then)
    return max(0.0, min(max(extrapolated, seasonal), bound) - state.error)


def _with_sample(state: ForecastState, rate: float, now: float) -> ForecastState:
    update = {"arrivals": 0.0, "seconds": 0.0, "at": now, "seasons": _seasons_with_sample(state, rate, now)}
    if state.at is None or now - state.at > TUNING.gap_seconds:
        return state.model_copy(update={**update, "level": rate, "trend": 0.0, "error": rate})
    passed = max(1.0, now - state.at)
    error = rate - (state.level + state.trend * passed)
    trend = state.trend + TUNING.trend_weight * TUNING.level_weight * error / passed
    return state.model_copy(
        update={
            **update,
            "level": _rounded(max(0.0, state.level + state.trend * passed + TUNING.level_weight * error)),
            "trend": _rounded(trend),
            "error": _rounded(state.error + TUNING.error_weight * (abs(error) - state.error)),
        }
    )


def _slot(at: float) -> int:
    return int(at % DAY_SECONDS / DAY_SECONDS * SLOTS) % SLOTS


def _season(state: ForecastState, at: float) -> float | None:
    """Return the arrival rate at this time of day on earlier days. Return None if it was never measured."""
    rate = state.seasons[_slot(at)] if state.seasons else _UNKNOWN
    return None if rate < 0 else rate


def _seasons_with_sample(state: ForecastState, rate: float, now: float) -> tuple[float, ...]:
    seasons = list(state.seasons or (_UNKNOWN,) * SLOTS)
    slot = _slot(now)
    known = seasons[slot]
    seasons[slot] = _rounded(rate if known < 0 else known + TUNING.season_weight * (rate - known))
    return tuple(seasons)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
