"""Detection of stale drafts: a sequential detector of rising cost per token, task by task.

A batch of requests gives one number, the log cost of a token: steps per token of a chain of three (`chain_cost`: from
the main-path counters, so that it does not move with the planned depth) times the known cost of a step. A step counts
as long as in the baseline, so its cost cancels out: a higher load or a slower node is no stale draft. The detector
watches how far the cost exceeds the baseline of that half hour.

It is a Shiryaev-Roberts e-detector: M_n = sum over j of the product of e-values from batch j to n, which is updated as
M_n = (M_(n-1) + 1) x e_n, and raises an alarm at M_n >= A. As long as the loss does not exceed the accepted one,
M_n - n is a supermartingale, so that A batches pass on average before a false alarm. A is the number of batches in a
month. `evidence` has the e-values; they assume symmetric noise around the baseline, not its size.

References:
    Shin, Ramdas and Rinaldo, "E-detectors: a nonparametric framework for sequential change detection", 2022 (arXiv
    2203.03532).
    Pollak, "Optimal detection of a change in distribution", Annals of Statistics 13, 1985.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from specdecode_operator.drafts.baseline import Baseline
from specdecode_operator.drafts.evidence import TILTS, increments, log_mean

BATCH_REQUESTS = 20
"""Finished requests of a task in one batch. The log evidence of a batch is at most one half, so batches are small.
Smaller ones would depend on each other, since the load of a worker changes slowly.
"""
DAY_MARGIN = 1.5
"""Standard deviations between days that are accepted in addition to ``minLossPercent``. Without this margin, every slow
day would be an alarm wherever days differ as much as that.
"""


@dataclass(frozen=True, slots=True)
class DriftDetector:
    """Log of the detector's sum for each tilt, since the last alarm or the last baseline."""

    logs: tuple[float, ...] = (-math.inf,) * len(TILTS)
    batches: int = 0

    def add(self, excess: float) -> DriftDetector:
        """Add one batch. ``excess`` is the loss beyond the accepted one, in standard deviations of a batch."""
        steps = increments(excess)
        return DriftDetector(
            tuple(_log_plus_one(value) + step for value, step in zip(self.logs, steps, strict=True)), self.batches + 1
        )

    @property
    def log_evidence(self) -> float:
        """Log of the mean of the sums. It is compared with the log of the batches between false alarms."""
        return log_mean(self.logs) if self.batches else -math.inf

    def alarms(self, batches_between: float) -> bool:
        """Return whether the loss is shown, with one false alarm in ``batches_between`` batches on average."""
        return self.log_evidence >= math.log(batches_between)


def excess_loss(baseline: Baseline, at: float, log_cost: float, min_loss: float) -> float:
    """Return how far a batch exceeds the baseline plus the accepted loss, in standard deviations.

    Args:
        baseline: Learnt baseline of the task.
        at: Time of the batch in seconds since the epoch.
        log_cost: Log of the batch's cost per token.
        min_loss: Loss of speed that is accepted, such as 0.05 for a token rate that is 5 % lower.
    """
    accepted = -math.log1p(-min_loss) + DAY_MARGIN * baseline.day_deviation
    return (log_cost - baseline.expected(at) - accepted) / baseline.deviation


def batches_between_alarms(baseline: Baseline, tasks: int) -> float:
    """Return the threshold that lets all ``tasks`` together raise one false alarm a month on average."""
    return max(baseline.batches_per_month * max(tasks, 1), 1.0)


class Cause(StrEnum):
    """Cause of a loss, by what changed with it."""

    TARGET_CHANGED = "TargetChanged"
    """Captures and baseline are void."""
    IMAGE_CHANGED = "ImageChanged"
    """A new baseline is learnt."""
    MIX_CHANGED = "MixChanged"
    """The whole got slower and no task did. It is only reported."""
    DRAFT_STALE = "DraftStale"
    """A new draft may be worth training."""
    NONE = "None"


def cause_of_loss(
    *, target_changed: bool, image_changed: bool, whole_alarms: bool, task_alarms: Collection[str]
) -> Cause:
    """Return the cause. A changed target or image explains a loss before any statistics do."""
    if target_changed:
        return Cause.TARGET_CHANGED
    if image_changed:
        return Cause.IMAGE_CHANGED
    if task_alarms:
        return Cause.DRAFT_STALE
    return Cause.MIX_CHANGED if whole_alarms else Cause.NONE


def _log_plus_one(log_value: float) -> float:
    """Return log(1 + x) for x given by its logarithm."""
    return log_value + math.log1p(math.exp(-log_value)) if log_value > 0 else math.log1p(math.exp(log_value))
