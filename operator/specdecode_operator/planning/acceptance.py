"""Chance that a chain's token of each depth is accepted, given that the one before it was; with its error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from specdecode_operator.measurements import NO_REQUESTS, Hits, RequestSums
from specdecode_operator.memory import DepthMemory, Kept

FIRST_PRIOR = Hits(1, 2)
DEPTH_WEIGHT = 10.0
"""How many observations the depth before counts for: acceptance changes little from one depth to the next."""
TASK_WEIGHT = 30.0
"""How many observations all tasks together count for in one task."""
LEAST_REQUESTS = 20


class Chance(NamedTuple):
    """An estimated probability."""

    p: float
    variance: float


def chain(kept: Kept, task: str | None, depth: int) -> list[Chance]:
    """Chances at depths 1..``depth`` of ``task``; None takes all tasks together."""
    pooled = _chain(kept.acceptance, depth, [], _design_effect(kept, None))
    if task is None:
        return pooled
    own = [cell for cell in kept.acceptance if cell.task == task]
    return _chain(own, depth, pooled, _design_effect(kept, task))


def drafts_seen(kept: Kept, task: str) -> float:
    """Weight of what is known about a task."""
    return sum(cell.total for cell in kept.acceptance if cell.task == task and cell.depth == 1)


def expected_tokens(chances: list[Chance]) -> float:
    """Tokens of one step with a chain of these chances: 1 + the sum of survivals."""
    tokens, survival = 1.0, 1.0
    for chance in chances:
        survival *= chance.p
        tokens += survival
    return tokens


def gradient(chances: list[Chance], depth: int) -> list[float]:
    """Derivative of log expected tokens of the chain of ``depth`` by each chance; zero beyond the chain."""
    survivals, survival = [], 1.0
    for chance in chances[:depth]:
        survival *= chance.p
        survivals.append(survival)
    tokens = 1 + sum(survivals)
    slopes = [sum(survivals[index:]) / chances[index].p / tokens for index in range(depth)]
    return slopes + [0.0] * (len(chances) - depth)


def _chain(cells: Iterable[DepthMemory], depth: int, pooled: list[Chance], effect: float) -> list[Chance]:
    found: list[Chance] = []
    known = list(cells)
    for level in range(1, depth + 1):
        hits = Hits(0, 0)
        for cell in known:
            if cell.depth == level:
                hits = hits.plus(Hits(cell.hits, cell.total))
        found.append(_chance(hits, _prior(found, pooled, level), effect))
    return found


def _prior(found: list[Chance], pooled: list[Chance], level: int) -> Hits:
    if pooled:
        return Hits(pooled[level - 1].p * TASK_WEIGHT, TASK_WEIGHT)
    return Hits(found[-1].p * DEPTH_WEIGHT, DEPTH_WEIGHT) if found else FIRST_PRIOR


def _chance(hits: Hits, prior: Hits, effect: float) -> Chance:
    """Posterior mean and variance; observations count for less by the design effect."""
    seen = Hits(hits.hits / effect, hits.total / effect).plus(prior)
    p = min(0.999, max(0.001, seen.hits / seen.total))
    return Chance(p, p * (1 - p) / (seen.total + 1))


def _design_effect(kept: Kept, task: str | None) -> float:
    """How much wider errors are because tokens of one request resemble each other; 1 while few requests ended.

    Variance of the ratio accepted / drafts over requests (linearised), against what independent drafts would give,
    where the accepted length of a draft varies about as much as its mean allows.
    """
    sums = NO_REQUESTS
    for cell in kept.requests:
        if task is None or cell.task == task:
            sums = sums.plus(RequestSums(*cell.sums))
    if sums.n < LEAST_REQUESTS or sums.d <= 0 or sums.a <= 0:
        return 1.0
    ratio = sums.a / sums.d
    between = max(0.0, sums.aa - 2 * ratio * sums.ad + ratio**2 * sums.dd) / sums.d
    independent = ratio * (1 + ratio)
    return min(20.0, max(1.0, between / independent))
