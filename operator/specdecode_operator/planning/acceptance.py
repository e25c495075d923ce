"""Chance that a drafted token is accepted, given that its parent was; by depth and rank, with its error."""

from __future__ import annotations

from collections.abc import Iterable

from specdecode_operator.planning.trees import Chance, Rates
from specdecode_operator.state.learned import AcceptanceCell, LearnedState
from specdecode_operator.telemetry.counters import NO_HITS, NO_REQUESTS, Hits, RequestSums

FIRST_PRIOR = Hits(1, 2)
DEPTH_WEIGHT = 10.0
"""How many observations the depth before counts for: acceptance changes little from one depth to the next."""
TASK_WEIGHT = 30.0
"""How many observations all tasks together count for in one task."""
PRIOR_EFFECT, PRIOR_REQUESTS = 4.0, 20.0
"""Design effect before requests have shown theirs, and how many requests it counts for: an answer that is easy is easy
all along, so a first one or two say little about the next."""
MOST_EFFECT = 20.0
LEAST_CHANCE = 0.001
"""No chance is smaller, and none is surer than its opposite."""
SIBLING_WEIGHT = 10.0
"""How many observations the main path counts for beside it: a sibling's children are a little worse."""
RANK_WEIGHT = 10.0
FIRST_RANK_SHARE, RANK_FALL = 0.2, 0.5
"""Of the misses, the share that rank 1 is taken to hit before it was seen, and how it falls from rank to rank: half
of what a young EAGLE-3 head shows (0.29 for ranks 1 and 2 together)."""


def rates(learned: LearnedState, task: str | None, depth: int, top_k: int = 1) -> Rates:
    """Chances of a tree's nodes down to ``depth`` for ranks below ``top_k``; task None takes all tasks together."""
    first = chain(learned, task, depth)
    if top_k == 1:
        return Rates(tuple((chance,) for chance in first), tuple((chance,) for chance in first))
    effect = design_effect(learned, task)
    main, sibling = [], []
    for level, chance in enumerate(first, start=1):
        seen = _seen(learned.acceptance, task, level, "main")
        beside = _seen(learned.acceptance, task, level, "sibling")
        prior = Hits(chance.p * SIBLING_WEIGHT, SIBLING_WEIGHT)
        main.append(_by_rank(chance, seen, effect, top_k))
        sibling.append(_by_rank(_chance(beside, prior, effect), beside.plus(seen.times(0.1)), effect, top_k))
    return Rates(tuple(main), tuple(sibling))


def chain(learned: LearnedState, task: str | None, depth: int) -> list[Chance]:
    """Chances at depths 1..``depth`` of ``task``; None takes all tasks together."""
    pooled = _chain(learned.acceptance, depth, [], design_effect(learned, None))
    if task is None:
        return pooled
    own = [cell for cell in learned.acceptance if cell.task == task]
    return _chain(own, depth, pooled, design_effect(learned, task))


def drafts_seen(learned: LearnedState, task: str) -> float:
    """Weight of what is known about a task."""
    return sum(cell.total for cell in learned.acceptance if cell.task == task and cell.depth == 1)


def _seen(cells: Iterable[AcceptanceCell], task: str | None, depth: int, parent: str) -> Hits:
    hits = NO_HITS
    for cell in cells:
        if cell.depth == depth and cell.parent == parent and task in (None, cell.task):
            hits = hits.plus(Hits(cell.hits, cell.total, cell.ranks))
    return hits


def _by_rank(first: Chance, seen: Hits, effect: float, top_k: int) -> tuple[Chance, ...]:
    """Rank 0 is given; later ranks share out its misses. No rank is better than the one before: a tree that had the
    second child without the first could not be written down."""
    found = [first]
    misses = max(0.0, seen.total - seen.hits)
    for rank in range(1, top_k):
        count = seen.ranks[rank - 1] if rank <= len(seen.ranks) else 0.0
        prior = FIRST_RANK_SHARE * RANK_FALL ** (rank - 1)
        share = min(1.0, (count + prior * RANK_WEIGHT) / (misses + RANK_WEIGHT))
        variance = (1 - first.p) ** 2 * share * (1 - share) / (
            misses / effect + RANK_WEIGHT + 1
        ) + share**2 * first.variance
        p = max(LEAST_CHANCE, min(found[-1].p, (1 - first.p) * share))
        found.append(Chance(p, variance))
    return tuple(found)


def _chain(cells: Iterable[AcceptanceCell], depth: int, pooled: list[Chance], effect: float) -> list[Chance]:
    found: list[Chance] = []
    known = list(cells)
    for level in range(1, depth + 1):
        hits = _seen(known, None, level, "main")
        found.append(_chance(hits, _prior(found, pooled, level), effect))
    return found


def _prior(found: list[Chance], pooled: list[Chance], level: int) -> Hits:
    if pooled:
        return Hits(pooled[level - 1].p * TASK_WEIGHT, TASK_WEIGHT)
    return Hits(found[-1].p * DEPTH_WEIGHT, DEPTH_WEIGHT) if found else FIRST_PRIOR


def _chance(hits: Hits, prior: Hits, effect: float) -> Chance:
    """Posterior mean and variance; observations count for less by the design effect where it is asked how sure the
    mean is."""
    seen = hits.plus(prior)
    p = min(1 - LEAST_CHANCE, max(LEAST_CHANCE, seen.hits / seen.total))
    return Chance(p, p * (1 - p) / (hits.total / effect + prior.total + 1))


def design_effect(learned: LearnedState, task: str | None) -> float:
    """How much wider errors are because tokens of one request resemble each other: what finished requests show,
    shrunk towards PRIOR_EFFECT while few have ended."""
    sums = NO_REQUESTS
    for cell in learned.requests:
        if task is None or cell.task == task:
            sums = sums.plus(RequestSums(*cell.sums))
    return effect_of([sums])


def effect_of(groups: Iterable[RequestSums]) -> float:
    """The same of groups that may differ in acceptance: the requests of each are held against their own."""
    weight, total = PRIOR_REQUESTS, PRIOR_EFFECT * PRIOR_REQUESTS
    for sums in groups:
        count = max(0.0, sums.n)
        weight, total = weight + count, total + _measured_effect(sums) * count
    return total / weight


def _measured_effect(sums: RequestSums) -> float:
    """Variance of the ratio accepted / drafts over requests (linearised), against what independent drafts would give,
    where the accepted length of a draft varies about as much as its mean allows."""
    if sums.d <= 0 or sums.a <= 0:
        return PRIOR_EFFECT
    ratio = sums.a / sums.d
    between = max(0.0, sums.aa - 2 * ratio * sums.ad + ratio**2 * sums.dd) / sums.d
    return min(MOST_EFFECT, max(1.0, between / (ratio * (1 + ratio))))
