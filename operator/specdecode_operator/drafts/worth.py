"""Worth of a distillation run: device time that it is expected to save, against the device time that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COST_FACTOR = 2.0
"""Least ratio of saved to spent device time. The saving is an estimate, and the run competes with serving."""
FIRST_RECOVERY = 0.5
"""Share of a loss that a run is expected to recover before any run of this deployment showed a figure."""


@dataclass(frozen=True, slots=True)
class TaskLoss:
    """A task that got slower. ``share`` is that of decode device time, ``loss`` the part of it that is lost."""

    task: str
    share: float
    loss: float


@dataclass(frozen=True, slots=True)
class Worth:
    """The sum behind a decision to train. Times are device seconds over the payback period."""

    lost_seconds: float
    saved_seconds: float
    needed_seconds: float

    @property
    def is_worth_it(self) -> bool:
        """True if the expected saving exceeds what is needed."""
        return self.saved_seconds > self.needed_seconds

    def sentence(self) -> str:
        """Return the sum in words, as `explain` prints it."""
        relation = "more" if self.is_worth_it else "not more"
        return (
            f"stale drafts cost {_hours(self.lost_seconds)} of device time within the payback period; a run is "
            f"expected to save {_hours(self.saved_seconds)}, {relation} than twice the last run's device time "
            f"({_hours(self.needed_seconds)})"
        )


def worth_of_run(
    losses: Sequence[TaskLoss],
    *,
    recovery: float,
    decode_seconds_per_day: float,
    payback_days: float,
    run_seconds: float,
) -> Worth:
    """Return the worth of a run: share x loss x recovery x decode device time, against twice the last run's time.

    Args:
        losses: Tasks with a shown loss. Shares and losses are clamped to 0..1.
        recovery: Share of the loss that the last runs recovered, or FIRST_RECOVERY.
        decode_seconds_per_day: Device seconds of decoding a day, all workers together.
        payback_days: Days within which the run must pay (spec: payback).
        run_seconds: Device seconds of the last run, or of its limit before the first.
    """
    lost = sum(_clamped(task.share) * _clamped(task.loss) for task in losses)
    seconds = min(lost, 1.0) * max(decode_seconds_per_day, 0.0) * max(payback_days, 0.0)
    return Worth(seconds, seconds * _clamped(recovery), COST_FACTOR * max(run_seconds, 0.0))


def _clamped(share: float) -> float:
    """Return a share within 0 and 1; a value that is no number counts as 0."""
    return min(max(share, 0.0), 1.0) if share == share else 0.0


def _hours(seconds: float) -> str:
    """Return a duration in hours with one digit."""
    return f"{seconds / 3600:.1f} h"
