"""Timestamps as Kubernetes and messages write them, and back-offs. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

_LARGEST_EXPONENT = 30
"""Failures beyond this many change no back-off that is in use, and would overflow."""


def iso(seconds: float) -> str:
    """Return a time in seconds since the epoch as a timestamp of the Kubernetes API."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def in_words(seconds: float) -> str:
    """Return a time in seconds since the epoch as messages show it, to the minute."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def seconds_of_timestamp(timestamp: str) -> float:
    """Return a timestamp of the Kubernetes API in seconds since the epoch. Raise ValueError if it is none."""
    return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()


def back_off(failures: int, *, first: float, most: float) -> float:
    """Return the pause in seconds after this many failures in a row: ``first``, doubled with each further one."""
    return min(most, first * 2.0 ** min(failures - 1, _LARGEST_EXPONENT))
