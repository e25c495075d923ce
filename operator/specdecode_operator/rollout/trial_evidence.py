"""Evidence of a canary: pairs of a worker's reports, each counted once, and what they say so far."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from specdecode_operator.api.draft import CountedPair, PairEvidence, TrialRecord
from specdecode_operator.drafts.crossover import (
    TILTS,
    Block,
    CellKey,
    Cost,
    Crossover,
    CrossoverTuning,
    Evidence,
    Verdict,
    increments,
    log_mean,
    pair_difference,
    task_differences,
)
from specdecode_worker.contract import TrialCost, TrialPair

GAIN_LIMIT = 3.0
"""Largest size of a bound of the gain, as a log ratio: twenty times as fast."""
BISECTIONS = 20
"""Halvings of the interval that has a bound; the rest is below a thousandth of a percent."""

FIRST_SCALE = CrossoverTuning().first_scale


@dataclass(frozen=True, slots=True)
class Gain:
    """Gain in speed of the candidate, as a share: 0.1 is 10 % faster."""

    mean: float
    least: float | None
    """Lower bound, valid at every look; an error of at most 1 in 40. None while the pairs give none."""
    most: float | None
    """Upper bound, likewise."""

    def __str__(self) -> str:
        mean = f"{100 * self.mean:+.1f} %"
        if self.least is None or self.most is None:
            return f"{mean}, too few pairs for bounds"
        return f"{mean} ({100 * self.least:+.1f} to {100 * self.most:+.1f} %)"


def count_pairs(trial: TrialRecord, pairs: Iterable[TrialPair], tasks: Collection[str]) -> TrialRecord:
    """Return the trial with the pairs that were not counted yet.

    Args:
        trial: The trial so far.
        pairs: Newest pairs of the worker that runs it.
        tasks: Names of the tasks that are judged apart.
    """
    for pair in sorted(pairs, key=lambda one: one.index):
        if pair.index < trial.next_pair:
            continue
        counted = _counted(pair, tasks)
        trial = (_with_pair(trial, counted) if counted else trial).model_copy(update={"next_pair": pair.index + 1})
    return trial


def verdict_of(trial: TrialRecord) -> Verdict:
    """Return what the counted pairs say. It may be read after every pair."""
    return _crossover(trial).verdict(_tuning(trial))


def _tuning(trial: TrialRecord) -> CrossoverTuning:
    return CrossoverTuning(min_gain=trial.min_gain, max_pairs=trial.max_pairs)


def _with_pair(trial: TrialRecord, pair: CountedPair) -> TrialRecord:
    after = _crossover(trial).add(pair.total, pair.tasks, _tuning(trial))
    stored = {
        task: PairEvidence(above=evidence.above, below=evidence.below)
        for task, evidence in ((None, after.total), *after.tasks.items())
    }
    return trial.model_copy(
        update={"pairs": (*trial.pairs, pair), "evidence": stored.pop(None), "task_evidence": stored}
    )


def _crossover(trial: TrialRecord) -> Crossover:
    """Return the test as it is after the counted pairs, from the stored logs: a replay takes a tenth of a second."""
    if trial.evidence is None:
        return Crossover()
    total = Evidence(trial.evidence.above, trial.evidence.below, tuple(abs(pair.total) for pair in trial.pairs))
    by_task = {
        task: Evidence(
            logs.above, logs.below, tuple(abs(pair.tasks[task]) for pair in trial.pairs if task in pair.tasks)
        )
        for task, logs in trial.task_evidence.items()
    }
    return Crossover(len(trial.pairs), total, by_task)


def gain_of(trial: TrialRecord) -> Gain | None:
    """Return the mean gain and its bounds. None before the first pair."""
    if not trial.pairs:
        return None
    return _gain(tuple(pair.total for pair in trial.pairs))


def evidence_text(trial: TrialRecord | None) -> str:
    """Return the evidence in one line."""
    gain = gain_of(trial) if trial else None
    if trial is None or gain is None:
        return "no pair was counted"
    return f"{len(trial.pairs)} pairs, gain {gain}"


def _counted(pair: TrialPair, tasks: Collection[str]) -> CountedPair | None:
    """Return the differences of a pair. None if its blocks share no cell or its costs are unusable."""
    incumbent, candidate = _block(pair.incumbent), _block(pair.candidate)
    try:
        total = pair_difference(incumbent, candidate)
        by_task = task_differences(incumbent, candidate, sorted(tasks))
    except (ValueError, OverflowError, ZeroDivisionError):
        return None
    if total is None or not all(map(math.isfinite, (total, *by_task.values()))):
        return None
    return CountedPair(total=total, tasks=by_task)


def _block(costs: Iterable[TrialCost]) -> Block:
    return {
        CellKey(cost.task, cost.concurrency, cost.context): Cost(cost.sequence_seconds, cost.tokens) for cost in costs
    }


@lru_cache(maxsize=64)
def _gain(differences: tuple[float, ...]) -> Gain:
    """Return the gain, cached: status, metrics and Events ask for it again and again between two pairs."""
    scales, evidence = [], Evidence()
    for difference in differences:
        scales.append(evidence.scale(FIRST_SCALE))
        evidence = evidence.add(difference, 0.0, FIRST_SCALE)
    least = _bound(differences, scales)
    most = _bound([-difference for difference in differences], scales)
    mean = min(max(sum(differences) / len(differences), -GAIN_LIMIT), GAIN_LIMIT)
    return Gain(
        math.expm1(mean), None if least is None else math.expm1(least), None if most is None else math.expm1(-most)
    )


def _bound(differences: Sequence[float], scales: Sequence[float]) -> float | None:
    """Return the largest gain that the evidence excludes from below, as a log ratio. None if it excludes none."""
    low, high = -GAIN_LIMIT, GAIN_LIMIT
    if not _excludes(differences, scales, low):
        return None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _excludes(differences, scales, middle) else (low, middle)
    return low


def _excludes(differences: Sequence[float], scales: Sequence[float], gain: float) -> bool:
    """Return whether the evidence decides against "the gain is at most this"."""
    logs = [0.0] * len(TILTS)
    for difference, scale in zip(differences, scales, strict=True):
        logs = [log + step for log, step in zip(logs, increments((difference - gain) / scale), strict=True)]
    return log_mean(logs) >= math.log(CrossoverTuning().evidence)
