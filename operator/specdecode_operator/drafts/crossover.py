"""Evidence of paired blocks: whether a candidate is faster, with confidence at any time. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

# Evidence against "the centre of a symmetric distribution is at most zero", valid at every look.
#
# For X symmetric around zero, E[exp(l X - l^2 X^2 / 2)] <= 1 for every l, without a moment condition (de la Pena, "A
# general class of exponential inequalities for martingales and ratios", Annals of Probability 27, 1999; Howard, Ramdas,
# McAuliffe and Sekhon, "Time-uniform Chernoff bounds via nonnegative supermartingales", Probability Surveys 17, 2020).
# For l > 0 the same holds for a centre below zero: exp(x - x^2 / 2) increases up to x = 1, and of two values around a
# lower centre the negative one is further from zero. Products over observations are supermartingales, and so is a
# mixture over l. By Ville's inequality a mixture reaches 1 / alpha with probability alpha at most, however often it is
# looked at.

TILTS = (0.25, 0.5, 1.0)
"""Values of l, for observations in units of their standard deviation. The best one is mean / (variance + mean^2).
Doubling their number would cost 0.7 in log evidence.
"""
FIRST_SCALE = 0.1
"""Assumed size of a pair's log difference before the first pair. It affects power only, not validity."""
_MEDIAN = 0.6745
"""Median of the size of a normal variable, in standard deviations."""
CLIP = 1.0
"""Largest size of an observation in units of its scale. Symmetry survives the clip. A low one makes the test robust: a
stall of a few seconds in one block then weighs no more than an ordinary difference.
"""


def increments(value: float) -> tuple[float, ...]:
    """Return the log increment of each tilt for one observation in units of its scale."""
    clipped = min(max(value, -CLIP), CLIP)
    return tuple(tilt * clipped - (tilt * clipped) ** 2 / 2 for tilt in TILTS)


def log_mean(logs: Sequence[float]) -> float:
    """Return the logarithm of the mean of numbers given by their logarithms."""
    largest = max(logs)
    return largest + math.log(sum(math.exp(value - largest) for value in logs) / len(logs))


# Canary test: incumbent and candidate run on one worker in pairs of request blocks in random order.
#
# The difference of a pair is symmetric around the candidate's gain, because the order is random and both blocks share
# worker, rows and time. No variance is estimated and no spread between pods enters. Two e-processes are watched: one
# against "gain <= minGain" (promote), one against "gain >= 0" (roll back); their guarantee is above. A task
# can veto: a candidate is promoted only when each task is shown not to lose more than a bound.


class Verdict(StrEnum):
    """Result of the canary test so far."""

    CONTINUE = "Continue"
    PROMOTE = "Promote"
    ROLL_BACK = "RollBack"
    UNDECIDED = "Undecided"
    """All pairs ran without enough evidence for either; the incumbent stays."""


class CellKey(NamedTuple):
    """Cost cell of a step: task, and bucket indices of concurrency and context."""

    task: str
    concurrency: int
    context: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Sums over the steps of one cell in one block, burn-in after the swap excluded, guard-held steps included."""

    sequence_seconds: float
    tokens: float


Block = Mapping[CellKey, Cost]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossoverTuning:
    """Limits of the canary test."""

    min_gain: float = 0.02
    """Gain in speed that a promotion must exceed (spec: minGainPercent)."""
    max_pairs: int = 120
    """Pairs after which the test ends undecided."""
    evidence: float = 40.0
    """e-value that decides: an error of at most 1 in 40 on each side."""
    max_task_loss: float = 0.10
    """Loss in speed that each task must be shown not to exceed."""
    task_evidence: float = 20.0
    """e-value that shows it: a task that loses more is promoted over in at most 1 of 20 cases."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Two e-processes over log differences: logs of the products by tilt, and the sizes of past differences."""

    above: tuple[float, ...] = (0.0,) * len(TILTS)
    """Against "the gain is at most the margin"."""
    below: tuple[float, ...] = (0.0,) * len(TILTS)
    """Against "the gain is at least 0"."""
    sizes: tuple[float, ...] = ()

    def add(self, difference: float, margin: float) -> Evidence:
        """Add one pair. The scale comes from earlier pairs, so that the products stay supermartingales."""
        scale = self.scale()
        above, below = increments((difference - margin) / scale), increments(-difference / scale)
        return Evidence(
            tuple(a + b for a, b in zip(self.above, above, strict=True)),
            tuple(a + b for a, b in zip(self.below, below, strict=True)),
            (*self.sizes, abs(difference)),
        )

    def scale(self) -> float:
        """Return the standard deviation by which the next difference is divided: by the median of earlier sizes."""
        return max(statistics.median((*self.sizes, _MEDIAN * FIRST_SCALE)) / _MEDIAN, 1e-4)


@dataclass(frozen=True, slots=True)
class Crossover:
    """State of one canary test, after the pairs so far."""

    pairs: int = 0
    total: Evidence = field(default_factory=Evidence)
    tasks: Mapping[str, Evidence] = field(default_factory=dict)

    def add(self, difference: float, tasks: Mapping[str, float], tuning: CrossoverTuning) -> Crossover:
        """Add one pair: the log difference of cost over all tasks, and by task where both blocks had it."""
        gain, loss = math.log1p(tuning.min_gain), math.log1p(-tuning.max_task_loss)
        known = dict(self.tasks)
        for task, value in tasks.items():
            known[task] = known.get(task, Evidence()).add(value, loss)
        return Crossover(self.pairs + 1, self.total.add(difference, gain), known)

    @property
    def log_loss(self) -> float:
        """Log e-value against "neither the whole nor any task loses": the mean of the whole's and of the tasks'."""
        whole = log_mean(self.total.below)
        if len(self.tasks) < 2:
            return whole
        return log_mean((whole, log_mean([log_mean(task.below) for task in self.tasks.values()])))

    def verdict(self, tuning: CrossoverTuning) -> Verdict:
        """Return what the evidence says now. It may be read after every pair."""
        needed = math.log(tuning.evidence)
        if self.log_loss >= needed:
            return Verdict.ROLL_BACK
        if log_mean(self.total.above) >= needed and not self.vetoes(tuning):
            return Verdict.PROMOTE
        return Verdict.UNDECIDED if self.pairs >= tuning.max_pairs else Verdict.CONTINUE

    def vetoes(self, tuning: CrossoverTuning) -> tuple[str, ...]:
        """Return the tasks that are not yet shown to lose at most the bound. A single task is the whole."""
        if len(self.tasks) < 2:
            return ()
        needed = math.log(tuning.task_evidence)
        return tuple(sorted(task for task, evidence in self.tasks.items() if log_mean(evidence.above) < needed))


def pair_difference(incumbent: Block, candidate: Block, task: str | None = None) -> float | None:
    """Return the log of the incumbent's cost per token over the candidate's, over the cells that both blocks have.

    Cells are weighted by a symmetric function of both token counts, so that the difference of two equal drafts is
    symmetric around 0 whatever the mix of cells was. Return None if no cell is shared.

    Args:
        incumbent: Costs of the incumbent's block by cell.
        candidate: Costs of the candidate's block by cell.
        task: Restriction to one task; None for all.
    """
    weights = total = 0.0
    for key in incumbent.keys() & candidate.keys():
        one, other = incumbent[key], candidate[key]
        if (task is not None and key.task != task) or not (_is_measured(one) and _is_measured(other)):
            continue
        weight = one.tokens * other.tokens / (one.tokens + other.tokens)
        ratio = (one.sequence_seconds / one.tokens) / (other.sequence_seconds / other.tokens)
        weights += weight
        total += weight * math.log(ratio)
    return total / weights if weights else None


def task_differences(incumbent: Block, candidate: Block, tasks: Iterable[str]) -> dict[str, float]:
    """Return the pair's difference by task, for the tasks that have a shared cell."""
    differences = {task: pair_difference(incumbent, candidate, task) for task in tasks}
    return {task: value for task, value in differences.items() if value is not None}


def _is_measured(cost: Cost) -> bool:
    """Return whether the cell has a usable cost."""
    return cost.tokens > 0 and cost.sequence_seconds > 0
