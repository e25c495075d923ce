"""Seconds of a decoding step: a linear model over contract.FEATURES, corrected by the kinds of step that were timed.

The model is Bayesian linear regression on the moments of all kinds of step. Its prior lets each coefficient carry a
whole step time, so that a depth that was never timed is extrapolated with a wide error. The line over verified tokens
bends at knots where the steps are evidence of it: an expert model's bends down, a dense one's up. On a noisy machine it
stays straight, because bends that follow noise make small trees seem slow and wide ones fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdecode_operator.planning.estimates import Estimate
from specdecode_operator.planning.loads import Load, bucket_of
from specdecode_operator.planning.tuning import TUNING
from specdecode_operator.state.learned import StepTimeCell
from specdecode_operator.telemetry.counters import PAIRS, K, Moments
from specdecode_worker.contract import FEATURES, Buckets

_ROWS, _COLUMNS = np.array(PAIRS).T
_ONE, _TOKENS, _PASSES = (FEATURES.index(name) for name in ("one", "verify_tokens", "draft_passes"))
_OF_A_SEQUENCE = [FEATURES.index(name) for name in ("sequences", "verify_tokens", "kv_tokens")]
Array = NDArray[np.float64]


class Batch(NamedTuple):
    """Shape of a step."""

    passes: int
    """Draft passes."""
    verified: float
    """Verified tokens of one sequence, the root included; the mean over the batch."""


class _Cell(NamedTuple):
    """One kind of step that was timed."""

    passes: int
    context: int
    at: float
    changed_at: float
    sequences: float
    verified: float
    context_tokens: float
    steps: float
    mean: float
    variance: float
    """Variance of the mean: noise, and wander from poll to poll."""
    line: float
    """Prediction of the linear model for the mean step of this kind."""


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """A fitted model and the kinds of step that it was made of."""

    cells: tuple[_Cell, ...]
    coefficients: tuple[float, ...]
    covariance: Array
    wander: float
    """Relative variance of means from poll to poll."""
    floor: float
    """Least prediction: half of the fastest step."""
    nearby: dict[Load, list[_Cell]] = field(default_factory=dict)

    @staticmethod
    @lru_cache(maxsize=1)
    def fit(costs: tuple[StepTimeCell, ...], wander: float = 0.0) -> StepTimeModel | None:
        """Return the model, or None while nothing was timed. The latest model is cached."""
        timed = (cost for cost in costs if not cost.prefill and cost.values[0] >= 1)
        known = [cost for cost in timed if cost.values[1] > TUNING.least_seconds * cost.values[0]]
        if not known:
            return None
        sums = [Moments(cost.values) for cost in known]
        count, mean, noise = np.array([(each.count, each.mean_seconds, each.variance) for each in sums]).T
        variance = noise / count + wander / np.array([max(1.0, cost.polls) for cost in known]) * mean**2
        reported = np.zeros((len(known), K, K))
        reported[:, _ROWS, _COLUMNS] = reported[:, _COLUMNS, _ROWS] = np.array([each.xx for each in sums])
        terms = _terms(np.array([each.mean_x for each in sums]))
        x = np.einsum("ntk,nk->nt", terms, [each.x for each in sums])
        xt = np.einsum("ntk,nk->nt", terms, [each.xt for each in sums])
        xx = terms @ reported @ terms.transpose(0, 2, 1)
        mean_x = x / count[:, None]
        scale = np.maximum(TUNING.least_seconds, mean_x.max(axis=0))
        weights = 1 / (variance + TUNING.model_error**2 * mean**2) / count
        seen = np.tensordot(weights, xx, 1) / np.outer(scale, scale), weights @ xt / scale
        straight, bent = (_posterior(*seen, mean.mean(), bend) for bend in TUNING.bends)
        is_bent = bent.evidence - straight.evidence > TUNING.bend_evidence
        covariance, scaled, _ = bent if is_bent else straight
        coefficients = scaled / scale
        sequences, verified, kv_tokens = np.maximum(TUNING.least_seconds, mean_x[:, _OF_A_SEQUENCE].T)
        columns = sequences, verified / sequences, kv_tokens / sequences, count, mean, variance, mean_x @ coefficients
        cells = tuple(
            _Cell(cost.draft_passes, cost.context_bucket, cost.at, cost.changed_at, *kind)
            for cost, kind in zip(known, np.column_stack(columns).tolist(), strict=True)
        )
        floor = float(mean.min()) / 2
        return StepTimeModel(cells, tuple(coefficients.tolist()), covariance / np.outer(scale, scale), wander, floor)

    def predict(self, load: Load, shapes: Iterable[Batch]) -> dict[Batch, Estimate]:
        """Return the step time of every shape at one load. A larger step takes no less time than a timed one."""
        order = sorted({*shapes, *(Batch(cell.passes, round(cell.verified, 1)) for cell in self.near(load))})
        x = np.array([_extended(features(load, *batch)) for batch in order])
        spreads = np.maximum(0.0, ((x @ self.covariance) * x).sum(axis=1)).tolist()
        lines = [max(self.floor, line) for line in (x @ np.array(self.coefficients)).tolist()]
        found = [self._estimate(load, *each) for each in zip(order, lines, spreads, strict=True)]
        return dict(zip(order, _rising(order, lines, found), strict=True))

    def mean(self, load: Load, batch: Batch) -> float:
        """Return the predicted seconds alone, for a search over many shapes."""
        return self._blend(load, batch, max(self.floor, self.linear(features(load, *batch))))[0]

    def linear(self, x: Sequence[float]) -> float:
        """Return the seconds by the linear model for features in the order of contract.FEATURES."""
        return float(sum(map(float.__mul__, map(float, _extended(x)), self.coefficients)))

    def drafting_share(self, load: Load, batch: Batch) -> float:
        """Return the share of a step that its draft passes surely take: the lower bound of 90 % confidence."""
        x = np.zeros(len(self.coefficients))
        x[_PASSES], x[K] = batch.passes, 1
        error = TUNING.z * math.sqrt(max(0.0, float(x @ self.covariance @ x)))
        return max(0.0, float(x @ np.array(self.coefficients)) - error) / self.mean(load, batch)

    def near(self, load: Load) -> list[_Cell]:
        """Return the kinds of step that were timed at about this load, the nearest in sequences first."""
        if load not in self.nearby:
            here = (cell for cell in self.cells if cell.context == load.context)
            distances = sorted((abs(math.log(cell.sequences / load.sequences)), cell) for cell in here)
            self.nearby[load] = [cell for distance, cell in distances if distance <= math.log(TUNING.load_ratio)]
        return self.nearby[load]

    def typical(self, found: Buckets, concurrency: int, context: int, max_num_seqs: int) -> Load:
        """Return the mean step measured in a bucket, by the nearest number of sequences; its upper edge if none was."""
        here = [cell for cell in self.cells if cell.context == context]
        inside = [cell for cell in here if bucket_of(found.concurrency, round(cell.sequences)) == concurrency]
        edge = (*found.concurrency, max(max_num_seqs, found.concurrency[-1] + 1))[concurrency]
        weights = {cell: cell.steps * cell.sequences for cell in inside or here}
        tokens = sum(weight * cell.context_tokens for cell, weight in weights.items()) / (sum(weights.values()) or 1)
        sequences = sum(weights.values()) / sum(cell.steps for cell in inside) if inside else edge
        return Load(max(1.0, sequences), tokens, context)

    def _estimate(self, load: Load, batch: Batch, line: float, spread: float) -> Estimate:
        error = spread + (TUNING.model_error**2 + self.wander) * line**2
        mean, cell, weight, shift = self._blend(load, batch, line)
        if cell is None:
            return Estimate(mean, error)
        own = cell.variance + (TUNING.model_error * shift) ** 2
        return Estimate(mean, weight**2 * own + (1 - weight) ** 2 * error, cell.steps, cell.at)

    def _blend(self, load: Load, batch: Batch, line: float) -> tuple[float, _Cell | None, float, float]:
        """Return the mean of the own kind of step, carried along the line, and weighed against it.

        Returns:
            Seconds, the kind of step (None if it was never timed), its weight, and how far it was carried.
        """
        cell = self._own(load, batch)
        if cell is None:
            return line, None, 0.0, 0.0
        weight = cell.steps / (cell.steps + TUNING.min_samples)
        carried = max(cell.mean / TUNING.load_ratio, min(cell.mean * TUNING.load_ratio, cell.mean + line - cell.line))
        return max(self.floor, weight * carried + (1 - weight) * line), cell, weight, carried - cell.mean

    def _own(self, load: Load, batch: Batch) -> _Cell | None:
        """Return the kind of step that is nearest in verified tokens (by halves), then in sequences."""
        ratio = TUNING.load_ratio
        cells = (cell for cell in self.near(load) if cell.passes == batch.passes)
        close = (cell for cell in cells if 1 / ratio < cell.verified / batch.verified < ratio)
        return min(close, key=lambda cell: int(2 * abs(cell.verified - batch.verified)), default=None)


def features(load: Load, passes: int, verified: float | None = None) -> tuple[float, ...]:
    """Return x of a decoding step in the order of contract.FEATURES; by default that of a chain."""
    tokens = load.sequences * (passes + 1 if verified is None else verified)
    return 1.0, load.sequences, tokens, load.sequences * load.context_tokens, float(passes), 0.0


def _extended(x: Sequence[float]) -> tuple[float, ...]:
    """Return the features and the further terms of the model, in the order of `_terms`."""
    return (*x, min(1.0, x[_PASSES]), *(min(x[_TOKENS], knot) for knot in TUNING.knots))


def _terms(mean_x: Array) -> Array:
    """Return every term of the model as a sum of features, by the mean features of the kinds: [kinds, terms, features].

    The first draft pass has costs of its own, and a token may cost more or less up to a knot than beyond it: the first
    tokens of a step read further experts, and the last ones are bound by arithmetic. Knots are edges of the kinds of
    step, so that all steps of one kind lie on one side.
    """
    is_below = mean_x[:, _TOKENS, None] <= np.array(TUNING.knots)
    terms = np.zeros((len(mean_x), K + 1 + len(TUNING.knots), K))
    terms[:, :K] = np.eye(K)
    terms[:, K, _ONE] = mean_x[:, _PASSES] > 0
    terms[:, K + 1 :, _TOKENS] = is_below
    terms[:, K + 1 :, _ONE] = TUNING.knots * ~is_below
    return terms


class _Posterior(NamedTuple):
    covariance: Array
    coefficients: Array
    evidence: float
    """Log of the marginal likelihood, but for a constant."""


def _posterior(moments: Array, sums: Array, step: float, bend: float) -> _Posterior:
    """Return the coefficients if a knot may add ``bend`` mean steps, and the evidence of the timed steps for that."""
    deviations = step * np.array([1.0] * (K + 1) + [bend] * (len(moments) - K - 1))
    precision = np.diag(deviations**-2) + moments
    covariance = _inverse(precision)
    evidence = sums @ covariance @ sums - np.linalg.slogdet(precision)[1] - 2 * np.log(deviations).sum()
    return _Posterior(covariance, covariance @ sums, float(evidence) / 2)


def _inverse(precision: Array) -> Array:
    """Return the inverse. If the reported moments cannot be those of steps, every feature counts for itself."""
    try:
        np.linalg.cholesky(precision)
        return np.asarray(np.linalg.inv(precision))
    except np.linalg.LinAlgError:
        return np.diag(1 / np.maximum(TUNING.least_seconds, np.abs(np.diag(precision))))


def _rising(order: Sequence[Batch], lines: Sequence[float], found: Sequence[Estimate]) -> list[Estimate]:
    """Return step times that rise with the shapes.

    Where two contradict that by more than noise, the one that was timed later is right: a change of step times shows
    first in the shape in use. The older one becomes the newer times the ratio of the linear model, with a wide error.
    """
    rising = list(found)
    for newest in sorted(range(len(found)), key=lambda index: -found[index].at):
        for index, other in enumerate(rising):
            known = rising[newest]
            direction = _direction(order[newest], order[index]) if other.at < known.at else 0
            if direction * (known.mean - other.mean) > TUNING.measured_error * known.mean:
                ratio = lines[index] / lines[newest]
                mean = known.mean * (max(1.0, ratio) if direction > 0 else min(1.0, ratio))
                # The correction itself is all the doubt that it adds, where that is less.
                carried = (known.relative_variance + TUNING.carried_error**2) * mean**2
                variance = min(carried, other.variance + (mean - other.mean) ** 2)
                rising[index] = other._replace(mean=mean, variance=variance)
    return rising


def _direction(one: Batch, two: Batch) -> int:
    """Return 1 if ``two`` is larger in every part, -1 if smaller, 0 if equal or not comparable."""
    if two.passes >= one.passes and two.verified >= one.verified:
        return int(two != one)
    return -int(two.passes <= one.passes and two.verified <= one.verified)
