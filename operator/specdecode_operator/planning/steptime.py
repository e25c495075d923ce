"""Seconds of a step: a linear model over contract.FEATURES, corrected by cells that were visited themselves.

The model is least squares over the cells' moments, shrunk towards nothing known: every coefficient may carry the
whole step, none must. So a depth that was never timed is extrapolated through draft passes and verified tokens, with
an error so wide that no row moves for it alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

from specdecode_operator.measurements import PAIRS, Moments
from specdecode_operator.memory import CostMemory
from specdecode_operator.planning.linear import Matrix, dot, inverse, product
from specdecode_operator.planning.loads import Load
from specdecode_worker.contract import FEATURES

MISFIT = 0.05
"""Relative error of a linear model of steps, beyond noise and wander."""
DRIFT = 0.02
"""Relative error of a cell's own mean on the quietest of machines."""
CARRIED = 0.15
"""Relative error of a time that was carried over from another depth."""
OWN_WEIGHT = 8.0
"""Steps after which a cell's own mean counts for half."""
NEAR = math.log(1.5)
"""How far a cell's sequences may be from the load's, as a ratio."""

_SEQUENCES = FEATURES.index("sequences")
_VERIFY_TOKENS = FEATURES.index("verify_tokens")


class Seconds(NamedTuple):
    """An estimated step time."""

    mean: float
    variance: float
    steps: float
    """Weight of the steps that were timed at this very kind; 0 means extrapolated."""
    at: float
    """When they were timed last, operator's clock; 0 means never."""
    line: float
    """What the linear model alone says."""


@dataclass(frozen=True, slots=True)
class _Cell:
    draft_passes: int
    context_bucket: int
    moments: Moments
    at: float

    def is_chain(self, depth: int) -> bool:
        """Whether these steps ran chains of ``depth``: a shadow adds draft passes without anything verified."""
        verified = self.moments.mean_x[_VERIFY_TOKENS] / max(1e-9, self.moments.mean_x[_SEQUENCES])
        return self.draft_passes == depth and abs(verified - depth - 1) < 0.5


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A fitted model and the cells that it was made of."""

    cells: tuple[_Cell, ...]
    scale: tuple[float, ...]
    coefficients: tuple[float, ...]
    covariance: Matrix
    wander: float
    floor: float
    """No step is predicted to be faster than a tenth of the fastest seen."""

    @classmethod
    def fit(cls, costs: Iterable[CostMemory], wander: float = 0) -> Self | None:
        """None when nothing was timed yet. ``wander`` is the relative variance of means from poll to poll."""
        cells = tuple(
            _Cell(cost.draft_passes, cost.context_bucket, Moments(cost.values), cost.at)
            for cost in costs
            if not cost.prefill and cost.values[0] >= 1 and cost.values[1] > 0
        )
        if not cells:
            return None
        scale = tuple(max(1e-9, *(cell.moments.mean_x[j] for cell in cells)) for j in range(len(FEATURES)))
        typical = sum(cell.moments.mean_seconds for cell in cells) / len(cells)
        precision = [[float(i == j) / typical**2 for j in range(len(FEATURES))] for i in range(len(FEATURES))]
        right = [0.0] * len(FEATURES)
        for cell in cells:
            _add(precision, right, cell.moments, scale, wander)
        covariance = inverse(precision)
        floor = 0.1 * min(cell.moments.mean_seconds for cell in cells)
        return cls(cells, scale, tuple(product(covariance, right)), covariance, wander, floor)

    def predict(self, load: Load, depth: int, context_bucket: int) -> Seconds:
        """Seconds of a decoding step at this load with a chain of ``depth`` for every sequence."""
        x = features(load, depth)
        line = max(self.floor, self._linear(x))
        spread = self._spread(x) + (MISFIT**2 + self.wander) * line**2
        cell = self._own(load, depth, context_bucket)
        if cell is None:
            return Seconds(line, spread, 0, 0, line)
        count, mean = cell.moments.count, cell.moments.mean_seconds
        weight = count / (count + OWN_WEIGHT)
        # Carried from the cell's typical step to this load's along the model's slope, by a third at most.
        shift = max(-mean / 3, min(mean / 3, line - self._linear(cell.moments.mean_x)))
        noise = cell.moments.variance / count + (DRIFT**2 + self.wander) * mean**2 + (MISFIT * shift) ** 2
        blended = weight * (mean + shift) + (1 - weight) * line
        variance = weight**2 * noise + (1 - weight) ** 2 * spread
        return Seconds(max(self.floor, blended), variance, count, cell.at, line)

    def _own(self, load: Load, depth: int, context_bucket: int) -> _Cell | None:
        near = [
            (abs(math.log(max(1e-9, cell.moments.mean_x[_SEQUENCES]) / load.sequences)), index)
            for index, cell in enumerate(self.cells)
            if cell.context_bucket == context_bucket and cell.is_chain(depth)
        ]
        distance, index = min(near, default=(math.inf, -1))
        return self.cells[index] if distance <= NEAR else None

    def _linear(self, x: tuple[float, ...]) -> float:
        return dot(self._scaled(x), self.coefficients)

    def _spread(self, x: tuple[float, ...]) -> float:
        scaled = self._scaled(x)
        return dot(scaled, product(self.covariance, scaled))

    def _scaled(self, x: tuple[float, ...]) -> list[float]:
        return [value / scale for value, scale in zip(x, self.scale, strict=True)]


def ordered(found: list[Seconds]) -> list[Seconds]:
    """Step times by rising depth, made to rise: a deeper chain never costs less.

    Where two contradict that, the one that was timed later is right: a change of cost shows first at the depth in
    use, and what is remembered of the others is old. The older one becomes the newer times what the linear model has
    between the two, with a wide error.
    """
    rising = list(found)
    for newest in sorted(range(len(found)), key=lambda index: -found[index].at):
        for index, other in enumerate(rising):
            known = rising[newest]
            if other.at < known.at and (index - newest) * (other.mean - known.mean) < 0:
                rising[index] = _carried(known, other, deeper=index > newest)
    return rising


def _carried(known: Seconds, other: Seconds, *, deeper: bool) -> Seconds:
    ratio = other.line / known.line
    mean = known.mean * (max(1.0, ratio) if deeper else min(1.0, ratio))
    variance = (known.variance / known.mean**2 + CARRIED**2) * mean**2
    return Seconds(mean, variance, 0, other.at, other.line)


def features(load: Load, depth: int) -> tuple[float, ...]:
    """x of a decoding step, in the order of FEATURES. Verified are the tree's nodes and the root."""
    return (
        1.0,
        load.sequences,
        load.sequences * (depth + 1),
        load.sequences * load.context_tokens,
        float(depth),
        0.0,
    )


def _add(precision: Matrix, right: list[float], moments: Moments, scale: tuple[float, ...], wander: float) -> None:
    """One cell's evidence: its noise shrinks with the number of steps, the model's misfit does not."""
    mean = moments.mean_seconds
    weight = 1 / (moments.variance / moments.count + (MISFIT**2 + wander) * mean**2) / moments.count
    for (i, j), value in zip(PAIRS, moments.xx, strict=True):
        added = weight * value / (scale[i] * scale[j])
        precision[i][j] += added
        if i != j:
            precision[j][i] += added
    for j, value in enumerate(moments.xt):
        right[j] += weight * value / scale[j]
