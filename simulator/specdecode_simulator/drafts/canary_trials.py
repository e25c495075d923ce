"""Trials of the canary test on one simulated worker: share of each verdict, and requests until it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdecode_operator.drafts.crossover import (
    Block,
    CellKey,
    Cost,
    Crossover,
    CrossoverTuning,
    Verdict,
    pair_difference,
    task_differences,
)
from specdecode_simulator.drafts.request_costs import DEFAULT_NOISE, CostNoise, Requests, draw_requests

BLOCK_REQUESTS = 32
BURN_IN_REQUESTS = 4
"""Requests after each swap that count for neither draft."""
TASK_COSTS = {"code": 0.0, "prose": 0.5}
"""Mean log cost by task."""
PROSE_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """Verdicts of many trials, and requests until each, by trial."""

    verdicts: Mapping[Verdict, int]
    requests: tuple[int, ...]

    def share(self, verdict: Verdict) -> float:
        """Return the share of trials with this verdict."""
        return self.verdicts.get(verdict, 0) / len(self.requests)

    @property
    def median_requests(self) -> float:
        """Median number of requests until the verdict, burn-in included."""
        return float(np.median(self.requests))


def run_trials(
    gains: Mapping[str, float],
    trials: int,
    seed: int,
    noise: CostNoise = DEFAULT_NOISE,
    tuning: CrossoverTuning | None = None,
) -> CanaryResult:
    """Run canary tests of a candidate that is faster by ``gains`` (0.1 for 10 %) in each task."""
    limits = tuning or CrossoverTuning()
    verdicts: Counter[Verdict] = Counter()
    requests = []
    for index in range(trials):
        verdict, pairs = trial(np.random.default_rng([seed, index]), gains, noise, limits)
        verdicts[verdict] += 1
        requests.append(pairs * 2 * (BLOCK_REQUESTS + BURN_IN_REQUESTS))
    return CanaryResult(verdicts, tuple(requests))


def trial(
    generator: Any,
    gains: Mapping[str, float],
    noise: CostNoise = DEFAULT_NOISE,
    tuning: CrossoverTuning | None = None,
) -> tuple[Verdict, int]:
    """Run one canary test. Return its verdict and number of pairs."""
    tuning, size = tuning or CrossoverTuning(), BLOCK_REQUESTS + BURN_IN_REQUESTS
    count = tuning.max_pairs * 2 * size
    first = np.repeat(generator.random(tuning.max_pairs) < 0.5, 2 * size)
    second_block = np.arange(count) // size % 2 == 1
    is_candidate = first != second_block
    tasks = np.where(generator.random(count) < PROSE_SHARE, "prose", "code")
    log_cost = np.zeros(count)
    for task, cost in TASK_COSTS.items():
        log_cost += (tasks == task) * (cost - is_candidate * np.log1p(gains[task]))
    drawn = draw_requests(generator, count, noise, log_cost)
    state = Crossover()
    for pair in range(tuning.max_pairs):
        start = pair * 2 * size
        one, other = (_block(drawn, tasks, start + half * size) for half in (0, 1))
        incumbent, candidate = (other, one) if is_candidate[start] else (one, other)
        difference = pair_difference(incumbent, candidate)
        if difference is None:
            continue
        state = state.add(difference, task_differences(incumbent, candidate, TASK_COSTS), tuning)
        verdict = state.verdict(tuning)
        if verdict is not Verdict.CONTINUE:
            return verdict, pair + 1
    return Verdict.UNDECIDED, tuning.max_pairs


def _block(drawn: Requests, tasks: Any, start: int) -> Block:
    """Return the costs of a block by task, without its burn-in."""
    rows = slice(start + BURN_IN_REQUESTS, start + BURN_IN_REQUESTS + BLOCK_REQUESTS)
    block = {}
    for task in TASK_COSTS:
        mine = tasks[rows] == task
        if mine.any():
            seconds, tokens = drawn.seconds[rows][mine], drawn.tokens[rows][mine]
            block[CellKey(task, 3, 0)] = Cost(float(seconds.sum()), float(tokens.sum()))
    return block
