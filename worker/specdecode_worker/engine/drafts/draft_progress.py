"""How far a draft has followed one request. Kept on the request, moved by the drafters and by what steps commit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftProgress:
    """``lag`` bounds how many of the last positions ``draft`` has yet to see, the root's among them."""

    draft: str = ""
    """Identity of the draft whose keys stand in the request's blocks."""
    lag: int = 1
    caught_up: int = 0
    """The draft has caught up with this many of the steps in flight, the oldest: they bound its lag no more."""
    start: int = 1
    """The draft sees no key before this position; up to 1 it sees all that it has, slot 0 too if it has one."""
    features_from: int = 0
    """The ring holds what this draft reads of the target from this position on."""

    def resume(self, prefix: int, drafted: int, *, has_state: bool) -> None:
        """The request goes on behind ``prefix`` cached tokens; over the last ``drafted`` of them the draft's own keys
        are valid. ``has_state``: the state of the prefix's last token was put into the ring."""
        self.lag, self.caught_up = 1, 0
        self.start = max(prefix - drafted, 1)
        self.features_from = max(prefix - 1, 0)
        if prefix and not has_state:
            self.start = self.features_from = prefix + 1

    def launched(self, most: int) -> None:
        """A step that the draft did not follow may commit ``most`` positions."""
        self.lag += most

    def collected(self, most: int, committed: int) -> None:
        """The oldest step in flight could have committed ``most`` positions and did ``committed``."""
        if self.caught_up:
            self.caught_up -= 1
        else:
            self.lag -= most - committed

    def reached_root(self, in_flight: int) -> None:
        """The draft has run up to the root, behind whatever the steps in flight commit."""
        self.lag, self.caught_up = 0, in_flight
