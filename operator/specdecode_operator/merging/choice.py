"""Rule for the drafts that a task merges: all of them without data, fewer for a sure gain, dropped ones on trial. Pure.

| case | condition | drafts |
|---|---|---|
| nothing is known, or drafts changed | first decision; another list in the spec; another hash | all declared |
| a gain | its lower bound (90 %) exceeds ``minGainPercent``; dwell and changes of the hour allow it | the best subset |
| dropped drafts were not measured for ten minutes | the trial costs at most ``explore`` | all, on trial |
| a trial was measured, or its time is over | | the best subset, or those before the trial |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specdecode_operator.api.v1alpha1 import StabilityLimits
from specdecode_operator.merging.options import Option
from specdecode_operator.merging.subsets import Names
from specdecode_operator.merging.tuning import TUNING
from specdecode_operator.planning.row_states import recent_changes
from specdecode_operator.planning.tuning import TUNING as PLANNING
from specdecode_operator.state.learned import MergeChoice

Because = Literal["bounds", "gain", "trial"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the changes of one task."""

    stability: StabilityLimits
    explore: float
    """Share of the device's time for measuring what does not run."""
    demand: float = 1.0
    """Share of the tokens that belongs to the task."""
    is_active: bool = True
    """The task had traffic lately."""

    @property
    def least_gain(self) -> float:
        """Least log gain of a change."""
        return math.log(1 + self.stability.min_gain_percent / 100) * self.demand


@dataclass(frozen=True, slots=True)
class Step:
    """A choice, why it changed, and the option behind it; ``because`` is None where the drafts stay."""

    choice: MergeChoice
    because: Because | None = None
    option: Option | None = None
    reason: str = ""
    """Reason why all drafts take part again after a trial."""


def all_declared(task: str, declared: Names, hashes: tuple[str, ...]) -> MergeChoice:
    """Return the choice without data."""
    return MergeChoice(task=task, drafts=declared, declared=declared, hashes=hashes)


def renewed(known: MergeChoice | None, task: str, declared: Names, hashes: tuple[str, ...]) -> Step:
    """Return the choice for these drafts: the known one, unless it was made for others."""
    fresh = all_declared(task, declared, hashes)
    if known is None:
        return Step(fresh)
    if known.declared == declared and len(known.hashes) == len(hashes):
        pairs = list(zip(known.hashes, hashes, strict=True))
        if all(before == now or "" in (before, now) for before, now in pairs):
            # A worker that does not answer leaves the hashes as they were.
            return Step(known.model_copy(update={"hashes": tuple(now or before for before, now in pairs)}))
    return Step(fresh.model_copy(update={"moves": known.moves}), "bounds")


def next_step(known: MergeChoice, options: Sequence[Option] | None, limits: Limits, now: float) -> Step:
    """Return the next choice.

    Args:
        known: The present choice.
        options: Subsets of the running drafts; None while too little is known of them.
        limits: Limits of changes.
        now: Time in seconds since the epoch.
    """
    if known.before is not None:
        return _after_trial(known, known.before, options, now)
    moves = recent_changes(known.moves, now)
    if len(moves) >= limits.stability.max_changes_per_hour:
        return Step(known)
    age = now - known.since
    if options and age >= limits.stability.min_dwell_seconds:
        best = max(options, key=lambda option: option.bound)
        if best.bound > limits.least_gain:
            return _changed(known, best, now, (*moves, now))
    if known.drafts != known.declared and limits.is_active and age >= retry_seconds(known.loss, limits):
        update = {"drafts": known.declared, "before": known.drafts, "since": now, "moves": (*moves, now)}
        return Step(known.model_copy(update=update), "trial")
    return Step(known)


def retry_seconds(loss: float, limits: Limits) -> float:
    """Return the time after which dropped drafts are tried again, so that trials cost at most ``limits.explore``."""
    if limits.explore <= 0:
        return math.inf
    return max(TUNING.retry_seconds, limits.stability.min_dwell_seconds, TUNING.trial_seconds * loss / limits.explore)


def _after_trial(known: MergeChoice, before: Names, options: Sequence[Option] | None, now: float) -> Step:
    """Return the better drafts once the trial was measured, and those before it once its time is over."""
    age = now - known.since
    if options and age >= PLANNING.recent_seconds:
        best = max(options, key=lambda option: (option.gain, len(option.names)))
        return _changed(known, best, now, known.moves)
    if age < TUNING.trial_seconds:
        return Step(known)
    update = {"drafts": before, "before": None, "since": now}
    return Step(known.model_copy(update=update), "trial")


def _changed(known: MergeChoice, best: Option, now: float, moves: tuple[float, ...]) -> Step:
    # A loss above e - 1 is bounded: trials are an hour and more apart then in any case.
    is_trial, is_whole = known.before is not None, best.names == known.declared
    update = {
        "drafts": best.names,
        "before": None,
        "since": now,
        "moves": moves,
        "loss": 0.0 if is_whole else math.expm1(max(0.0, min(1.0, best.gain))),
        "reason": "" if is_whole else known.reason,
    }
    return Step(known.model_copy(update=update), "trial" if is_trial else "gain", best)
