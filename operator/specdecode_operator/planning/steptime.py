"""Seconds of a step: a linear model over contract.FEATURES, corrected by cells that were visited themselves.

The model is least squares over the cells' moments, shrunk towards nothing known: every coefficient may carry the
whole step, none must. So a depth that was never timed is extrapolated through draft passes and verified tokens, with
an error so wide that no row moves for it alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Self

from specdecode_operator.planning.linear import Matrix, dot, inverse, product
from specdecode_operator.planning.loads import Load
from specdecode_operator.state.learned import StepTimeCell
from specdecode_operator.telemetry.counters import PAIRS, Moments
from specdecode_worker.contract import FEATURES

MISFIT = 0.05
"""Relative error of a linear model of steps, beyond noise and wander."""
DRIFT = 0.02
"""Relative error of a mean of one minute on the quietest of machines."""
CARRIED = 0.15
"""Relative error of a time that was carried over from another depth."""
OWN_WEIGHT = 8.0
"""Steps after which a cell's own mean counts for half."""
NEAR = math.log(1.5)
"""How far a cell's sequences may be from the load's, as a ratio."""

LEAST_SECONDS = 1e-7
"""A step that is said to take less was not timed."""
SAME_TOKENS, SAME_SHARE = 0.5, 1 / 3
"""How far a cell's verified tokens of a sequence may be from a shape's to be carried there along the slope: less than
one node, or a third of many. A mix of tasks verifies somewhat less than the chain that was timed."""
DIFFERENCE_MISFIT = 0.5
"""Relative error of what a few more or fewer verified tokens take, beyond the error of the slope: kernels go by
blocks and buckets, so the truth is a staircase about the line."""

_SEQUENCES = FEATURES.index("sequences")
_VERIFY_TOKENS = FEATURES.index("verify_tokens")
_PASSES = FEATURES.index("draft_passes")


class Seconds(NamedTuple):
    """An estimated step time."""

    mean: float
    variance: float
    steps: float
    """Weight of the steps that were timed at this very kind, be it long ago; 0 means extrapolated."""
    at: float
    """When they were timed last, operator's clock; 0 means never."""
    line: float
    """What the linear model alone says."""
    drift: float = 0
    """Of the relative variance, what steps that were timed at the same time share."""


@dataclass(frozen=True, slots=True)
class _Cell:
    draft_passes: int
    context_bucket: int
    moments: Moments
    at: float
    mean_x: tuple[float, ...]
    log_sequences: float
    wander: float
    """Relative variance of the mean beyond noise: each poll strays by itself, so it averages out over them."""
    drift: float
    """The same of what drifts over minutes."""
    verified: float
    """Tokens of one sequence: a shadow adds draft passes without anything verified."""
    changed_at: float

    @classmethod
    def of(cls, cost: StepTimeCell, wander: float) -> Self:
        moments = Moments(cost.values)
        mean = moments.mean_x
        sequences = max(1e-9, mean[_SEQUENCES])
        verified = mean[_VERIFY_TOKENS] / sequences
        strayed, drifted = wander / max(1.0, cost.polls), DRIFT**2 / max(1.0, cost.spells)
        key = cost.draft_passes, cost.context_bucket
        return cls(*key, moments, cost.at, mean, math.log(sequences), strayed, drifted, verified, cost.changed_at)

    def distance(self, load: Load) -> float:
        """Between its sequences and the load's, as the logarithm of their ratio."""
        return abs(self.log_sequences - math.log(load.sequences))


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
    curves: dict[tuple[Load, int, int], Curve] = field(default_factory=dict)
    """Those that were asked for: a load's shapes are weighed several times over in one look."""

    @staticmethod
    def fit(costs: Iterable[StepTimeCell], wander: float = 0) -> StepTimes | None:
        """None when nothing was timed yet. ``wander`` is the relative variance of means from poll to poll."""
        return _fitted(tuple(costs), wander)

    @classmethod
    def of(cls, costs: Iterable[StepTimeCell], wander: float) -> Self | None:
        cells = tuple(
            _Cell.of(cost, wander)
            for cost in costs
            if not cost.prefill and cost.values[0] >= 1 and cost.values[1] > LEAST_SECONDS * cost.values[0]
        )
        if not cells:
            return None
        scale = (*(max(1e-9, *(cell.mean_x[j] for cell in cells)) for j in range(len(FEATURES))), 1.0)
        typical = sum(cell.moments.mean_seconds for cell in cells) / len(cells)
        precision = [[float(i == j) / typical**2 for j in range(len(scale))] for i in range(len(scale))]
        right = [0.0] * len(scale)
        for cell in cells:
            _add(precision, right, cell, scale)
        covariance = _inverse(precision)
        floor = 0.1 * min(cell.moments.mean_seconds for cell in cells)
        return cls(cells, scale, tuple(product(covariance, right)), covariance, wander, floor)

    def predict(self, load: Load, passes: int, context_bucket: int, verified: float | None = None) -> Seconds:
        """Seconds of a decoding step at this load, see Curve; a chain of ``passes`` tokens for every sequence when
        ``verified`` is not given."""
        return self.curve(load, passes, context_bucket).seconds(passes + 1 if verified is None else verified)

    def curve(self, load: Load, passes: int, context_bucket: int) -> Curve:
        """Step times of one number of draft passes, by how much is verified."""
        key = load, passes, context_bucket
        if key not in self.curves:
            self.curves[key] = self._curve(load, passes, context_bucket)
        return self.curves[key]

    def _curve(self, load: Load, passes: int, context_bucket: int) -> Curve:
        near = []
        for cell in self.cells:
            if cell.context_bucket == context_bucket and cell.draft_passes == passes:
                distance = cell.distance(load)
                if distance <= NEAR:
                    near.append((distance, cell.verified, cell))
        plain = self.linear(features(load, passes, 1))
        slope = self.linear(features(load, passes, 2)) - plain
        cells = tuple((verified, cell) for _, verified, cell in sorted(near, key=lambda found: found[0]))
        return Curve(self, load, passes, plain, slope, cells)

    def visited(self, load: Load, context_bucket: int) -> bool:
        """Whether any steps were timed at about this load."""
        return any(True for _ in self._near(load, context_bucket))

    def changed_at(self, load: Load, context_bucket: int) -> float:
        """When steps of about this load were last seen to take something else; 0 is never."""
        return max((cell.changed_at for cell in self._near(load, context_bucket)), default=0.0)

    def _near(self, load: Load, context_bucket: int) -> Iterator[_Cell]:
        """Steps that were timed at about this load."""
        return (cell for cell in self.cells if cell.context_bucket == context_bucket and cell.distance(load) <= NEAR)

    def slope_variance(self, load: Load) -> float:
        """Of the seconds that one more verified token of every sequence takes."""
        x = tuple(load.sequences * float(name == "verify_tokens") for name in FEATURES)
        return self.spread(x)

    def linear(self, x: tuple[float, ...]) -> float:
        """Of features as contract.FEATURES has them."""
        return dot(self._scaled(x), self.coefficients)

    def spread(self, x: tuple[float, ...]) -> float:
        scaled = self._scaled(x)
        return dot(scaled, product(self.covariance, scaled))

    def _scaled(self, x: tuple[float, ...]) -> list[float]:
        """With a feature of our own at the end: whether anything is drafted at all."""
        return [value / scale for value, scale in zip((*x, min(1.0, x[_PASSES])), self.scale, strict=True)]


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of steps of one load and one number of draft passes."""

    times: StepTimes
    load: Load
    passes: int
    plain: float
    """What the linear model has for one verified token a sequence, and for each further one."""
    slope: float
    cells: tuple[tuple[float, _Cell], ...]
    """Verified tokens a sequence and steps timed at this load, the nearest in sequences first."""
    known: dict[float, Seconds] = field(default_factory=dict)
    """By verified tokens, those that were asked for."""

    def mean(self, verified: float) -> float:
        """Seconds alone: what a search over many shapes needs."""
        line = max(self.times.floor, self.plain + self.slope * (verified - 1))
        cell = self._own(verified)
        return line if cell is None else max(self.times.floor, self._blend(cell, verified, line)[0])

    def seconds(self, verified: float) -> Seconds:
        """Seconds of a step that verifies ``verified`` tokens of every sequence, the root included, on average."""
        if verified not in self.known:
            self.known[verified] = self._seconds(verified)
        return self.known[verified]

    def _seconds(self, verified: float) -> Seconds:
        x = features(self.load, self.passes, verified)
        line = max(self.times.floor, self.plain + self.slope * (verified - 1))
        cell = self._own(verified)
        # A kind that was never timed wanders unseen; where so many passes drafted here, it has been seen.
        wander = 0.0 if cell is None and self._drafted_here else self.times.wander
        spread = self.times.spread(x) + (MISFIT**2 + wander) * line**2
        if cell is None:
            return Seconds(line, spread, 0, 0, line)
        blended, weight, shift = self._blend(cell, verified, line)
        count, mean = cell.moments.count, cell.moments.mean_seconds
        tokens = DIFFERENCE_MISFIT * self.slope * (verified - cell.verified)
        noise = cell.moments.variance / count + (cell.drift + cell.wander) * mean**2
        noise += (MISFIT * shift) ** 2 + tokens**2
        variance = weight**2 * noise + (1 - weight) ** 2 * spread
        return Seconds(max(self.times.floor, blended), variance, count, cell.at, line, weight**2 * cell.drift)

    @property
    def _drafted_here(self) -> bool:
        return any(verified > 1 + SAME_TOKENS for verified, _ in self.cells)

    def _own(self, verified: float) -> _Cell | None:
        """Steps like these that were timed themselves."""
        reach = max(SAME_TOKENS, SAME_SHARE * verified)
        near = [(abs(tokens - verified) // SAME_TOKENS, index) for index, (tokens, _) in enumerate(self.cells)]
        distance, index = min(near, default=(math.inf, -1))
        return self.cells[index][1] if distance * SAME_TOKENS < reach else None

    def _blend(self, cell: _Cell, verified: float, line: float) -> tuple[float, float, float]:
        """The cell's own mean, carried from its typical step to this load's along the model's slope, by a third at
        most, and weighed against the line: (seconds, weight, how far it was carried)."""
        count, mean = cell.moments.count, cell.moments.mean_seconds
        weight = count / (count + OWN_WEIGHT)
        shift = max(-mean / 3, min(mean / 3, line - self.times.linear(cell.mean_x)))
        return weight * (mean + shift) + (1 - weight) * line, weight, shift


@lru_cache(maxsize=1)
def _fitted(costs: tuple[StepTimeCell, ...], wander: float) -> StepTimes | None:
    """Kept, for one look asks for it up to four times: the rows, the pace, and what a prompt takes."""
    return StepTimes.of(costs, wander)


def ordered(found: list[Seconds], sizes: Sequence[tuple[float, ...]] | None = None) -> list[Seconds]:
    """Step times made to rise with ``sizes``: more draft passes and more verified tokens never cost less. Sizes are
    compared in all their parts; without them the list is by rising depth.

    Where two contradict that, the one that was timed later is right: a change of cost shows first at the depth in
    use, and what is remembered of the others is old. The older one becomes the newer times what the linear model has
    between the two, with a wide error.
    """
    rising = list(found)
    by = sizes or [(float(index),) for index in range(len(found))]
    for newest in sorted(range(len(found)), key=lambda index: -found[index].at):
        for index, other in enumerate(rising):
            known = rising[newest]
            if other.at < known.at:
                way = _way(by[newest], by[index])
                if way * (other.mean - known.mean) < 0:
                    rising[index] = _carried(known, other, deeper=way > 0)
    return rising


def _way(one: tuple[float, ...], two: tuple[float, ...]) -> int:
    """1 when ``two`` is the larger, -1 when it is the smaller, 0 when they are equal or cannot be compared."""
    parts = [b - a for a, b in zip(one, two, strict=True)]
    if all(part >= 0 for part in parts):
        return int(any(parts))
    return -1 if all(part <= 0 for part in parts) else 0


def _carried(known: Seconds, other: Seconds, *, deeper: bool) -> Seconds:
    ratio = other.line / known.line
    mean = known.mean * (max(1.0, ratio) if deeper else min(1.0, ratio))
    # A slight contradiction is noise: then the correction itself is all the doubt that it adds.
    variance = min((known.variance / known.mean**2 + CARRIED**2) * mean**2, other.variance + (mean - other.mean) ** 2)
    return Seconds(mean, variance, other.steps, other.at, other.line)


def features(load: Load, passes: int, verified: float | None = None) -> tuple[float, ...]:
    """x of a decoding step, in the order of FEATURES. Verified are the tree's nodes and the root: a chain's by
    default."""
    return (
        1.0,
        load.sequences,
        load.sequences * (passes + 1 if verified is None else verified),
        load.sequences * load.context_tokens,
        float(passes),
        0.0,
    )


def _inverse(precision: Matrix) -> Matrix:
    """Where a report's moments are none that steps can have, every feature stands for itself."""
    try:
        return inverse(precision)
    except ValueError:
        return inverse([[abs(x) if i == j else 0.0 for j, x in enumerate(row)] for i, row in enumerate(precision)])


def _add(precision: Matrix, right: list[float], cell: _Cell, scale: tuple[float, ...]) -> None:
    """One cell's evidence: its noise shrinks with the number of steps, the model's misfit does not."""
    moments, last = cell.moments, len(FEATURES)
    mean = moments.mean_seconds
    weight = 1 / (moments.variance / moments.count + (MISFIT**2 + cell.wander) * mean**2) / moments.count
    for (i, j), value in zip(PAIRS, moments.xx, strict=True):
        added = weight * value / (scale[i] * scale[j])
        precision[i][j] += added
        if i != j:
            precision[j][i] += added
    for j, value in enumerate(moments.xt):
        right[j] += weight * value / scale[j]
    if cell.draft_passes:
        # The first pass brings what further ones do not (a launch, the catching up), so drafting is a feature by
        # itself. It is 1 in all steps of the cell: its moments are those of the features alone.
        for j, value in enumerate(moments.x):
            precision[last][j] += weight * value / scale[j]
            precision[j][last] += weight * value / scale[j]
        precision[last][last] += weight * moments.count
        right[last] += weight * moments.seconds
