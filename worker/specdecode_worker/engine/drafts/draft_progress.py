"""Progress of a draft through the text of one request, updated by the drafters and by committed steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftProgress:
    """Progress of a draft through the text of one request.

    ``lag`` is an upper bound on the number of positions up to the root, the root included, that the draft has not
    processed yet.
    """

    draft: str = ""
    """Hash of the draft whose keys are in the blocks of the request."""
    lag: int = 1
    caught_up: int = 0
    """Number of steps in flight, the oldest ones, that the draft has already processed; they do not affect ``lag``."""
    start: int = 1
    """First position whose keys the draft attends to. 0 and 1 mean all keys, including slot 0 if it exists."""
    features_from: int = 0
    """First position from which the ring of DeviceState holds the target states that the draft reads."""

    def resume(self, prefix: int, drafted: int, *, has_state: bool) -> None:
        """Restart behind a cached prefix.

        Args:
            prefix: Length of the prefix, in tokens.
            drafted: Number of tokens at the end of the prefix for which the draft's own keys are valid.
            has_state: True if the target state of the prefix's last token is in the ring.
        """
        self.lag, self.caught_up = 1, 0
        self.start = max(prefix - drafted, 1)
        self.features_from = max(prefix - 1, 0)
        if prefix and not has_state:
            self.start = self.features_from = prefix + 1

    def record_launch(self, most: int) -> None:
        """Record the launch of a step that may commit up to ``most`` positions, which the draft has not processed."""
        self.lag += most

    def record_collect(self, most: int, committed: int) -> None:
        """Record that the oldest step in flight committed ``committed`` of at most ``most`` positions."""
        if self.caught_up:
            self.caught_up -= 1
        else:
            self.lag -= most - committed

    def reached_root(self, in_flight: int) -> None:
        """Record that the draft has run up to the root, which lies behind all that the steps in flight commit."""
        self.lag, self.caught_up = 0, in_flight
