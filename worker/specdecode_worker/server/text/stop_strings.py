"""Search for stop strings in streamed text; text that may be the start of a stop string is held back."""

from __future__ import annotations


class StopFinder:
    """Filter that ends a stream of text at the first stop string.

    Each ``push`` returns the text that may be sent to the client; after a stop string, it returns no more text. With
    ``shows_stop`` the stop string itself is returned too.
    """

    __slots__ = ("_held", "_shows_stop", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], *, shows_stop: bool = False) -> None:
        assert all(stops), "an empty stop string would end every text at once"
        self._stops = stops
        self._shows_stop = shows_stop
        self._held = ""
        self.matched: str | None = None
        """Stop string that ended the text; None before that."""

    def push(self, text: str) -> str:
        """Add ``text`` and return the held text that cannot be part of a stop string."""
        if self.matched is not None:
            return ""
        self._held += text
        first = min(((at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0), default=None)
        if first is not None:
            at, self.matched = first
            return self._release(at + (len(self.matched) if self._shows_stop else 0), drop_rest=True)
        return self._release(len(self._held) - self._possible_begin())

    def flush(self) -> str:
        """Return the text held back. Call it at the end of the stream."""
        return self._release(len(self._held))

    def _possible_begin(self) -> int:
        """Return the length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(self._held))
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0

    def _release(self, length: int, *, drop_rest: bool = False) -> str:
        """Remove and return the first ``length`` characters of the held text."""
        shown, self._held = self._held[:length], "" if drop_rest else self._held[length:]
        return shown
