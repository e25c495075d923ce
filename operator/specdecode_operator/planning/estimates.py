"""The planner's constants, its estimates from decayed sums, loads, and the model of step times, all without I/O."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import mul
from statistics import NormalDist
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from specdecode_operator.state.learned import ContextCell, LoadState, StepTimeCell, range_name, rounded
from specdecode_operator.telemetry.counters import PAIRS, SEQUENCES, Delta, Hits, K, Moments
from specdecode_worker.contract import FEATURES, Buckets

HOUR_SECONDS = 3600.0
"""Period of ``StabilityLimits.max_changes_per_hour``."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the estimates and of the decision rule."""

    # --- acceptance: pseudo-observations and correlations
    prior_drafts: float = 10.0
    """Drafts that the depth above (or the main path, or the prior of ranks) counts for. Trade."""
    task_prior_drafts: float = 30.0
    """Drafts that all tasks together count for in one task. Trade."""
    prior_effect: float = 4.0
    """Design effect of requests before any has finished (ratio of variances): recorded answers show 2 to 8."""
    prior_requests: float = 20.0
    """Finished requests that ``prior_effect`` counts for. Trade."""
    rank_share: float = 0.2
    """Share of the misses that rank 1 hits before it was measured, halved with each rank: half of an EAGLE-3 head's."""
    depth_correlation: float = 0.3
    """Correlation of the errors of one task's acceptance at two depths: recorded answers."""
    request_spread: float = 0.2
    """Standard deviation between requests of log(tokens after / tokens before) of a change: recorded 0.02 to 0.17."""
    # --- forgetting and change points
    half_life_drafts: float = 300.0
    """Drafts, times the design effect, after which an acceptance counts for half. Trade."""
    half_life_samples: float = 128.0
    """Steps after which a step time counts for half, and requests after which traffic does. Trade."""
    recent_seconds: float = 20.0
    """Seconds before which no estimate counts for half, during which evidence is new, and that a trial is timed: four
    polls. Trade."""
    contradicted_weight: float = 0.25
    """Weight of contradicted evidence, as a share of the new evidence. Trade."""
    rate_change_errors: float = 3.0
    """Standard errors between two acceptance rates that are a change point: one false alarm in 370."""
    time_change_errors: float = 4.0
    """Standard errors between two step times that are a change point: step times have heavier tails."""
    min_samples: float = 8.0
    """Steps or drafts that outweigh a prior of step times, and below which nothing shows a change. Trade."""
    # --- step times
    model_error: float = 0.05
    """Relative error of the linear model beyond noise: recorded step times."""
    knots: tuple[float, ...] = (8.0, 32.0, 128.0)
    """Verified tokens of a step at which the slope over tokens may change, at edges of the kinds of step. Trade."""
    bends: tuple[float, float] = (1e-3, 0.15)
    """Standard deviation of what a knot adds to a step, as a share of the mean step: if the line is straight, and if it
    bends. Trade."""
    bend_evidence: float = 5.0
    """Log of the ratio of both likelihoods above which it bends. Before serving it is 83 for Llama 4 Scout and 6 for
    Maverick. Trade."""
    carried_error: float = 0.15
    """Relative error of a time carried over from another shape; a smaller shift of a mean is noise. Recorded steps."""
    load_ratio: float = 1.5
    """Largest ratio of sequences, tokens or times of steps that say something about each other. Trade."""
    wander_share: float = 0.1
    """Weight of one poll in the variance of means between polls. Trade."""
    wander_limit: float = 4.0
    """Most that one poll counts for in it, relative to what is usual: a single jump is no wander. Trade."""
    least_seconds: float = 1e-7
    """Seconds of a step below which it was not timed: no device is as fast."""
    # --- decision
    z: float = 1.28
    """Standard errors by which a gain must exceed its cost: 90 % confidence."""
    z_changed: float = 0.84
    """The same after a change point outdated the evidence behind the present shapes: 80 % confidence."""
    trial_polls: float = 4.0
    """Polls over which a trial averages the wander of step times: ``recent_seconds`` of five seconds each."""
    measured_error: float = 0.03
    """Relative error that a trial leaves, and smallest loss that is believed: recorded noise of 15 s."""
    drift_per_dwell: float = 0.065
    """Standard deviation per square root of ``minDwellSeconds`` by which an unmeasured gain drifts. Trade."""
    window_seconds: float = 60.0
    """Seconds between choices for loads other than the present one, after which a trial ends unmeasured, and without
    traffic after which a task is absent and no trial begins: as long as the window of measurements."""
    # --- samples
    least_share: float = 0.005
    """Smallest share of the sequences that a task or a kind of batch counts with, and least acceptance rate. Trade."""
    fleet_samples: float = 500.0
    """Drafts or tokens below which no figure of the fleet is shown: an error over 2 %."""
    task_samples: float = 50.0
    """The same for a task, which has no rows of its own before either: an error over 7 %."""
    context_edges: tuple[int, int] = (1024, 8192)
    """Edges of the context buckets, in tokens. They are fixed, so that stored step times stay comparable."""


TUNING = Tuning()


# Estimates, forgetting, and change points.
#
# Evidence is a sum of observations that decays by the slower of two clocks, observations and seconds: a busy fleet
# averages over about ten seconds, a quiet one over a few hundred observations. New evidence is also counted apart. Once
# it contradicts the older evidence, the older loses most of its weight, so that a step reaches the plan at once.

Evidence = TypeVar("Evidence", Hits, Moments)
NORMAL = NormalDist()


class Estimate(NamedTuple):
    """An estimated quantity: an acceptance rate, or a step time in seconds."""

    mean: float
    variance: float
    weight: float = 0
    """Effective number of samples; 0 means that it was never measured itself."""
    at: float = 0
    """Time of the last measurement on the operator's clock, in seconds."""

    @property
    def odds(self) -> float:
        """Odds of a rate."""
        return self.mean / (1 - self.mean)

    @property
    def relative_variance(self) -> float:
        """Variance of the logarithm."""
        return self.variance / self.mean**2


def mean_time(parts: Sequence[tuple[float, Estimate]]) -> Estimate:
    """Return the mean of step times, whose errors go together. It is timed if the batches that matter are."""
    if len(parts) == 1:
        return parts[0][1]
    heaviest = max(weight for weight, _ in parts)
    often = [seconds for weight, seconds in parts if weight >= heaviest / 2]
    mean = sum(weight * seconds.mean for weight, seconds in parts)
    error = sum(weight * math.sqrt(seconds.variance) for weight, seconds in parts)
    return Estimate(mean, error**2, min(one.weight for one in often), min(one.at for one in often))


def confidence(gain: float, error: float) -> float:
    """Return P(gain > 0), with the gain taken as normal."""
    return NORMAL.cdf(gain / error) if error > 0 else float(gain > 0)


def joined(
    before: Evidence, gathered: Evidence, fresh: Evidence, keep: float, changed: Callable[[Evidence, Evidence], bool]
) -> tuple[Evidence, Evidence, bool]:
    """Return all evidence, its new part, and whether the new part contradicts the older.

    Args:
        before: Evidence so far.
        gathered: The part of ``before`` that is still new.
        fresh: Evidence of this poll.
        keep: Share of ``before`` that is not forgotten.
        changed: Test for a change point.
    """
    older, new = before.minus(gathered).times(keep), gathered.times(keep).plus(fresh)
    contradicted = changed(older, new)
    if contradicted:
        older = older.times(min(1, TUNING.contradicted_weight * new.weight / older.weight))
    return older.plus(new), new, contradicted


def kept_share(count: float, seconds: float, half_life: float) -> float:
    """Return the share of old evidence that stays after ``count`` observations in ``seconds``."""
    return float(0.5 ** min(count / half_life, max(0.0, seconds) / TUNING.recent_seconds))


def rate_changed(before: Hits, fresh: Hits, effect: float = 1.0) -> bool:
    """Return whether two samples can hardly have one rate, by their likelihood ratio.

    ``effect`` drafts count as one, because the tokens of one request resemble each other.
    """
    if min(before.total, fresh.total) < TUNING.min_samples:
        return False
    ratio = _log_likelihood(before) + _log_likelihood(fresh) - _log_likelihood(before.plus(fresh))
    return 2 * ratio > TUNING.rate_change_errors**2 * max(2.0, effect)


def time_changed(before: Moments, fresh: Moments, wander: float = 0.0) -> bool:
    """Return whether steps of one kind take another time now.

    ``wander`` is the relative variance of a poll's mean beyond the noise of its steps.
    """
    if min(before.count, fresh.count) < TUNING.min_samples:
        return False
    gap = abs(before.mean_seconds - fresh.mean_seconds)
    error = before.variance / before.count + fresh.variance / fresh.count + wander * before.mean_seconds**2
    return gap > max(TUNING.time_change_errors * math.sqrt(error), TUNING.carried_error * before.mean_seconds)


def _log_likelihood(sample: Hits) -> float:
    return sum(part * math.log(part / sample.total) for part in (sample.hits, sample.total - sample.hits) if part > 0)


# Loads: the buckets of a plan, and the load that was observed.


class Load(NamedTuple):
    """The typical step of one bucket."""

    sequences: float
    context_tokens: float
    """KV tokens of one sequence."""
    context: int = 0
    """Context bucket."""


def buckets_for(max_num_seqs: int) -> Buckets:
    """Return concurrency edges at powers of two below ``max_num_seqs``, where the last bucket ends."""
    powers = range(max(1, (max_num_seqs - 1).bit_length()))
    return Buckets(concurrency=tuple(1 << power for power in powers), context=TUNING.context_edges)


def bucket_of(edges: tuple[int, ...], value: float) -> int:
    """Return the index of the bucket of ``value``. Upper edges are inclusive, the last bucket is open."""
    return bisect_left(edges, value)


def observed_load(known: LoadState, delta: Delta, now: float) -> LoadState:
    """Return the load of this poll, or ``known`` if the poll had few steps and they took less than a second."""
    decoding = {key: moments for key, moments in delta.steps.items() if not key.prefill}
    count = sum(moments.count for moments in decoding.values())
    if count < TUNING.min_samples and sum(moments.seconds for moments in decoding.values()) < 1:
        return known
    by_context: dict[int, float] = {}
    for key, moments in decoding.items():
        by_context[key.context_bucket] = by_context.get(key.context_bucket, 0) + moments.seconds
    tasks = {task: hits.total for (task, depth), hits in delta.acceptance.items() if depth == 1}
    return LoadState(
        sequences=rounded(sum(moments.x[SEQUENCES] for moments in decoding.values()) / count),
        context_bucket=max(by_context, key=by_context.__getitem__),
        task=max(tasks, key=tasks.__getitem__, default=known.task),
        at=now,
    )


def bucket_text(found: Buckets, at: Iterable[tuple[int, int]]) -> str:
    """Return the names of loads (concurrency, context), for decisions."""
    names = dict[str, list[str]]()
    for concurrency, context in at:
        names.setdefault(range_name(found.context, context), []).append(range_name(found.concurrency, concurrency))
    return "; ".join(f"concurrency {' or '.join(counts)}, context {context}" for context, counts in names.items())


def context_rates(found: Buckets, cells: Iterable[ContextCell]) -> dict[str, dict[str, float]]:
    """Return the acceptance of the first draft token by task and name of the context, of tasks seen in several."""
    rates = dict[str, dict[str, float]]()
    for cell in sorted(cells, key=lambda cell: (cell.task, cell.context)):
        if cell.total >= TUNING.task_samples:
            rates.setdefault(cell.task, {})[range_name(found.context, cell.context)] = cell.hits / cell.total
    return {task: own for task, own in rates.items() if len(own) > 1}


# Seconds of a decoding step: a linear model over contract.FEATURES, corrected by the kinds of step that were timed.
#
# The model is Bayesian linear regression on the moments of all kinds of step. Its prior lets each coefficient carry a
# whole step time, so that a depth that was never timed is extrapolated with a wide error. The line over verified tokens
# bends at knots where the steps are evidence of it: an expert model's bends down, a dense one's up. On a noisy machine
# it stays straight, because bends that follow noise make small trees seem slow and wide ones fast.

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


MOST_LOADS = 1000
"""Loads that a model remembers: those of scaling differ from poll to poll, also while no step is timed."""


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
        return float(sum(map(mul, _extended(x), self.coefficients)))

    def drafting_share(self, load: Load, batch: Batch) -> float:
        """Return the share of a step that its draft passes surely take: the lower bound of 90 % confidence."""
        x = np.zeros(len(self.coefficients))
        x[_PASSES], x[K] = batch.passes, 1
        error = TUNING.z * math.sqrt(max(0.0, float(x @ self.covariance @ x)))
        return max(0.0, float(x @ np.array(self.coefficients)) - error) / self.mean(load, batch)

    def near(self, load: Load) -> list[_Cell]:
        """Return the kinds of step that were timed at about this load, the nearest in sequences first."""
        if load not in self.nearby:
            if len(self.nearby) >= MOST_LOADS:
                self.nearby.clear()
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
        ratio, (passes, verified) = TUNING.load_ratio, batch
        cells = [cell for cell in self.near(load) if cell.passes == passes]
        close = [cell for cell in cells if cell.verified < ratio * verified and verified < ratio * cell.verified]
        return min(close, key=lambda cell: int(2 * abs(cell.verified - verified)), default=None)


def features(load: Load, passes: int, verified: float | None = None) -> tuple[float, ...]:
    """Return x of a decoding step in the order of contract.FEATURES; by default that of a chain."""
    tokens = load.sequences * (passes + 1 if verified is None else verified)
    return 1.0, load.sequences, tokens, load.sequences * load.context_tokens, float(passes), 0.0


def _extended(x: Sequence[float]) -> tuple[float, ...]:
    """Return the features and the further terms of the model, in the order of `_terms`."""
    return (*x, min(1.0, x[_PASSES]), *[min(x[_TOKENS], knot) for knot in TUNING.knots])


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
    for newest in sorted((index for index, one in enumerate(found) if one.at), key=lambda index: -found[index].at):
        for index, other in enumerate(rising):
            known = rising[newest]
            direction = _direction(order[newest], order[index]) if other.at < known.at else 0
            if direction * (known.mean - other.mean) > TUNING.measured_error * known.mean:
                ratio = lines[index] / lines[newest]
                mean = known.mean * (max(1.0, ratio) if direction > 0 else min(1.0, ratio))
                # The correction itself is all the doubt that it adds, where that is less.
                carried = (known.relative_variance + TUNING.carried_error**2) * mean**2
                variance = min(carried, other.variance + (mean - other.mean) ** 2)
                rising[index] = Estimate(mean, variance, other.weight, other.at)
    return rising


def _direction(one: Batch, two: Batch) -> int:
    """Return 1 if ``two`` is larger in every part, -1 if smaller, 0 if equal or not comparable."""
    if two.passes >= one.passes and two.verified >= one.verified:
        return int(two != one)
    return -int(two.passes <= one.passes and two.verified <= one.verified)
