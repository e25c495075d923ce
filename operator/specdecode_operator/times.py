"""Timestamps and durations as Kubernetes, specs and messages write them, and back-offs. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache

_LARGEST_EXPONENT = 30
"""Failures beyond this many change no back-off that is in use, and would overflow."""

_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def iso(seconds: float) -> str:
    """Return a time in seconds since the epoch as a timestamp of the Kubernetes API."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def in_words(seconds: float) -> str:
    """Return a time in seconds since the epoch as messages show it, to the minute."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def seconds_of_timestamp(timestamp: str) -> float:
    """Return a timestamp of the Kubernetes API in seconds since the epoch. Raise ValueError if it is none."""
    return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()


@lru_cache(maxsize=256)
def seconds_of(duration: str) -> float:
    """Return the seconds of a Duration or a Latency. Cached, because a planner cycle asks thousands of times."""
    return sum(float(count) * _SECONDS[unit] for count, unit in re.findall(r"([0-9.]+)(ms|h|m|s)", duration))


def back_off(failures: int, *, first: float, most: float) -> float:
    """Return the pause in seconds after this many failures in a row: ``first``, doubled with each further one."""
    return min(most, first * 2.0 ** min(failures - 1, _LARGEST_EXPONENT))
