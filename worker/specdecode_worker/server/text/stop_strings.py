"""Stop strings over text that arrives in pieces: cut exactly, and nothing leaves that might begin one."""

from __future__ import annotations


class StopFinder:
    """Feed text in order; what comes out may be shown. After a stop string was found, nothing more comes out.

    ``shows_stop`` lets the stop string itself come out too.
    """

    __slots__ = ("_held", "_shows_stop", "_stops", "found")

    def __init__(self, stops: tuple[str, ...], *, shows_stop: bool = False) -> None:
        assert all(stops), "an empty stop string would end every text at once"
        self._stops = stops
        self._shows_stop = shows_stop
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """The part of what is held and ``text`` that surely precedes every stop string."""
        if self.found is not None:
            return ""
        self._held += text
        first = min(((at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0), default=None)
        if first is not None:
            at, self.found = first
            return self._release(at + (len(self.found) if self._shows_stop else 0), drop_rest=True)
        return self._release(len(self._held) - self._possible_begin())

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        return self._release(len(self._held))

    def _possible_begin(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(self._held))
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0

    def _release(self, length: int, *, drop_rest: bool = False) -> str:
        shown, self._held = self._held[:length], "" if drop_rest else self._held[length:]
        return shown
