"""Exponential forgetting, and when new evidence makes older evidence give way. Pure.

Forgetting goes by the slower of two clocks, observations and seconds: a busy fleet averages over about ten seconds,
a quiet one over a few hundred observations. Where a batch contradicts the estimate beyond chance, the estimate gives
way at once, so that a step reaches the plan with the next poll.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from specdecode_operator.telemetry.counters import Hits, Moments

HALF_LIFE_SECONDS = 20.0
"""Long against a poll and a machine's weather: what changes for good is told by contradiction, not by forgetting."""
GATHER_SECONDS = 15.0
"""What was new longer ago is new no more."""
CONTRADICTED_WEIGHT = 0.25
"""Weight of all older evidence that new evidence contradicts, as a share of the new."""
DIGITS = 6

Evidence = TypeVar("Evidence", Hits, Moments)


def joined(
    before: Evidence, gathered: Evidence, fresh: Evidence, keep: float, changed: Callable[[Evidence, Evidence], bool]
) -> tuple[Evidence, Evidence, bool]:
    """All evidence, what of it is new, which gathers over polls until it contradicts the older, and whether it does:
    then the older gives way."""
    older, new = apart(before, gathered, fresh, keep)
    contradicted = changed(older, new)
    if contradicted:
        older = older.times(min(1, CONTRADICTED_WEIGHT * new.weight / older.weight))
    return older.plus(new), new, contradicted


def apart(before: Evidence, gathered: Evidence, fresh: Evidence, keep: float) -> tuple[Evidence, Evidence]:
    """What is older, and what is new."""
    return before.plus(gathered.times(-1)).times(keep), gathered.times(keep).plus(fresh)


def is_recent(at: float, now: float) -> bool:
    """Whether what was new when it was remembered is new still."""
    return now - at < GATHER_SECONDS


def kept_share(count: float, seconds: float, half_life: float) -> float:
    """Of what was known before ``count`` observations in ``seconds``; ``half_life`` is in observations."""
    return float(max(0.5 ** (count / half_life), 0.5 ** (max(0.0, seconds) / HALF_LIFE_SECONDS)))


def short(value: float) -> float:
    """Six digits are more than was measured, and the memory must stay small."""
    return float(f"{value:.{DIGITS}g}")


def shorts(values: tuple[float, ...]) -> tuple[float, ...]:
    """The same of many, written and read as one text: a look shortens a thousand."""
    return tuple(map(float, ((f"%.{DIGITS}g " * len(values)) % values).split()))
