"""Service rate: requests that leave per second while others wait, for Retry-After."""

from __future__ import annotations

import math

HALF_LIFE_SECONDS = 30.0
"""Busy time after which an observation has half of its weight: several requests of a chat, and shorter than a surge."""
MAX_RETRY_SECONDS = 60
"""Largest Retry-After. OpenAI's clients follow the header up to one minute."""


class ServiceRate:
    """Moving average of the departures per second, over the time in which requests were waiting.

    Without waiting requests the workers are not at their limit, and departures only follow arrivals.
    """

    def __init__(self, now: float) -> None:
        self._last = now
        self._busy = False
        self._departures = self._busy_seconds = 0.0

    def set_busy(self, now: float, busy: bool) -> None:
        """Record whether requests wait from now on."""
        self._advance(now)
        self._busy = busy

    def add_departure(self, now: float) -> None:
        """Record that a request has left its place."""
        self._advance(now)
        if self._busy:
            self._departures += 1

    def retry_seconds(self, requests: int, now: float, *, share: float = 1.0) -> int:
        """Return the whole seconds in which ``requests`` get a place, from 1 to ``MAX_RETRY_SECONDS``.

        Args:
            requests: Number of requests that are ahead.
            now: Time in seconds.
            share: Share of all departures that makes places for these requests.
        """
        self._advance(now)
        rate = share * self._departures / self._busy_seconds if self._busy_seconds else 0.0
        seconds = math.ceil(requests / rate) if rate * MAX_RETRY_SECONDS > requests else MAX_RETRY_SECONDS
        return max(1, seconds)

    def _advance(self, now: float) -> None:
        elapsed = now - self._last
        self._last = now
        if self._busy and elapsed > 0:
            decay = 0.5 ** (elapsed / HALF_LIFE_SECONDS)
            self._departures *= decay
            self._busy_seconds = self._busy_seconds * decay + elapsed
