"""What will come in by the time that a new worker is ready: the day's season, the level of now, and its trend.

A small relative of Holt-Winters: the season is what came in at this time of day on earlier days, the level and the
damped trend are of the last minutes. Less its own error it may raise the floor of the replicas, never lower it.
"""

from __future__ import annotations

from specdecode_operator.state.learned import ForecastState

SAMPLE_SECONDS = 60.0
"""Arrivals are counted for so long before they say anything."""
GAP_SECONDS = 900.0
"""After a longer silence of the operator the level starts anew; the season stays."""
DAY_SECONDS = 86400.0
SLOTS = 48
"""Half an hour each: 48 numbers in a ConfigMap, and no day is the same to the minute."""
LEVEL_SHARE, TREND_SHARE, ERROR_SHARE = 0.3, 0.1, 0.1
"""Weight of a new sample: about the last three minutes for the level, ten for its trend and its error."""
SEASON_SHARE = 0.03
"""Of a sample in its slot: thirty samples of one day move the slot by half."""
DAMPING_SECONDS = 300.0
"""A trend is believed for about so long: what grows does not grow for ever."""
RELAPSE_SECONDS = 3600.0
"""A day that differs from the season is taken to differ for about so long."""


def observed(memory: ForecastState, arrivals: float, seconds: float, *, now: float) -> ForecastState:
    """``memory`` with what came in within the last ``seconds``."""
    gathered = memory.model_copy(
        update={"arrivals": memory.arrivals + max(0.0, arrivals), "seconds": memory.seconds + max(0.0, seconds)}
    )
    if gathered.seconds < SAMPLE_SECONDS:
        return gathered
    return _sampled(gathered, gathered.arrivals / gathered.seconds, now)


def expected_rate(memory: ForecastState, *, now: float, ahead_seconds: float) -> float:
    """Arrivals a second ``ahead_seconds`` from now, less the error of such forecasts; 0 while nothing is known."""
    if memory.at is None or now - memory.at > GAP_SECONDS:
        return 0.0
    grown = memory.level + memory.trend * min(ahead_seconds, DAMPING_SECONDS)
    then, this = _season(memory, now + ahead_seconds), _season(memory, now)
    if then is None or this is None:
        return max(0.0, grown - memory.error)
    stays = max(0.0, 1 - ahead_seconds / RELAPSE_SECONDS)
    by_season = then + (memory.level - this) * stays
    return max(0.0, min(max(grown, by_season), max(memory.level, 2 * then)) - memory.error)


def _sampled(memory: ForecastState, rate: float, now: float) -> ForecastState:
    emptied = {"arrivals": 0.0, "seconds": 0.0, "at": now, "seasons": _with_sample(memory, rate, now)}
    if memory.at is None or now - memory.at > GAP_SECONDS:
        return memory.model_copy(update={**emptied, "level": rate, "trend": 0.0, "error": rate})
    passed = max(1.0, now - memory.at)
    off = rate - (memory.level + memory.trend * passed)
    trend = memory.trend + TREND_SHARE * LEVEL_SHARE * off / passed
    return memory.model_copy(
        update={
            **emptied,
            "level": _short(max(0.0, memory.level + memory.trend * passed + LEVEL_SHARE * off)),
            "trend": _short(trend),
            "error": _short(memory.error + ERROR_SHARE * (abs(off) - memory.error)),
        }
    )


def _slot(at: float) -> int:
    return int(at % DAY_SECONDS / DAY_SECONDS * SLOTS) % SLOTS


def _season(memory: ForecastState, at: float) -> float | None:
    """What the time of day brought on earlier days; None where there was none."""
    value = memory.seasons[_slot(at)] if memory.seasons else -1.0
    return None if value < 0 else value


def _with_sample(memory: ForecastState, rate: float, now: float) -> tuple[float, ...]:
    seasons = list(memory.seasons or (-1.0,) * SLOTS)
    slot = _slot(now)
    known = seasons[slot]
    seasons[slot] = _short(rate if known < 0 else known + SEASON_SHARE * (rate - known))
    return tuple(seasons)


def _short(value: float) -> float:
    return float(f"{value:.4g}")
