"""Posterior of the acceptance rate of a drafted token, by task, depth, main path or sibling, and rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce

from specdecode_operator.api.v1alpha1 import SpeculationSpec
from specdecode_operator.planning.draft_trees import TaskAcceptance
from specdecode_operator.planning.estimates import Estimate
from specdecode_operator.planning.task_bounds import bounds_of
from specdecode_operator.planning.tuning import TUNING
from specdecode_operator.state.learned import LearnedState
from specdecode_operator.telemetry.counters import NO_HITS, NO_REQUESTS, Hits, RequestSums
from specdecode_worker.contract import OTHER_TASK


@dataclass(frozen=True, slots=True)
class AcceptanceModel:
    """Acceptance of every task, from the counts of one deployment.

    A Beta posterior for each depth, whose prior is the depth above; that of a task's is all tasks together.
    """

    learned: LearnedState
    speculation: SpeculationSpec
    cache: dict[tuple[str, int | None], TaskAcceptance] = field(default_factory=dict)

    def of(self, task: str, context: int | None = None) -> TaskAcceptance:
        """Return the acceptance of one task, in one context bucket. Without tasks in the spec, ``other`` is all."""
        if (task, context) not in self.cache:
            bounds = bounds_of(self.speculation, task)
            name = None if task == OTHER_TASK and not self.speculation.tasks else task
            rates = task_acceptance(self.learned, name, bounds.most, bounds.top_k)
            shift = context_odds(self.learned, name, context, rates) if context is not None else None
            self.cache[task, context] = rates if shift is None else rates.at_odds(*shift)
        return self.cache[task, context]


def context_odds(
    learned: LearnedState, task: str | None, context: int, rates: TaskAcceptance
) -> tuple[float, float] | None:
    """Return by what factor the odds of acceptance differ in a context, and the variance of its logarithm.

    One factor holds for all depths and ranks: deeper tokens are too seldom in a long context. None where all tokens
    are of one context. Task None is all tasks together.
    """
    cells = [cell for cell in learned.contexts if task in (None, cell.task)]
    if not rates.main or not any(cell.context != context and cell.total >= TUNING.min_samples for cell in cells):
        return None
    mean, effect = rates.main[0][0].mean, design_effect(learned, task)
    counts = reduce(Hits.plus, (Hits(c.hits, c.total) for c in cells if c.context == context), NO_HITS)
    own = _posterior(counts, mean, TUNING.task_prior_drafts, effect)
    return own.odds / rates.main[0][0].odds, own.variance / (own.mean * (1 - own.mean)) ** 2


def task_acceptance(learned: LearnedState, task: str | None, depth: int, top_k: int = 1) -> TaskAcceptance:
    """Return the acceptance down to ``depth`` for ranks below ``top_k``. Task None is all tasks together."""
    effect, main, sibling = design_effect(learned, task), [], []
    for level, rate in enumerate(chain_rates(learned, task, depth), start=1):
        seen, beside = _counts(learned, task, level, "main"), _counts(learned, task, level, "sibling")
        main.append(_by_rank(rate, seen, effect, top_k))
        after_sibling = _posterior(beside, rate.mean, TUNING.prior_drafts, effect)
        sibling.append(_by_rank(after_sibling, beside, effect, top_k))
    return TaskAcceptance(tuple(main), tuple(sibling))


def chain_rates(learned: LearnedState, task: str | None, depth: int) -> list[Estimate]:
    """Return the acceptance rates of a chain at depths 1..``depth``. Task None is all tasks together."""
    pooled = chain_rates(learned, None, depth) if task is not None else []
    effect, found = design_effect(learned, task), list[Estimate]()
    for level in range(1, depth + 1):
        if pooled:
            mean, weight = pooled[level - 1].mean, TUNING.task_prior_drafts
        else:
            mean, weight = (found[-1].mean, TUNING.prior_drafts) if found else (0.5, 2)
        found.append(_posterior(_counts(learned, task, level, "main"), mean, weight, effect))
    return found


def lacking(learned: LearnedState) -> str | None:
    """Return what the estimates lack for a first decision, or None once they are reliable.

    The independent drafts must outweigh their prior twice, and the steps under traffic a prior of step times. Steps
    that workers timed before they served are the prior.
    """
    parts = []
    if chain_rates(learned, None, 1)[0].weight < 2 * TUNING.prior_drafts:
        parts.append(f"acceptance rests on fewer than {2 * TUNING.prior_drafts:g} independent drafts")
    if sum(cost.values[0] - cost.made_up for cost in learned.costs) < TUNING.min_samples:
        parts.append(f"fewer than {TUNING.min_samples:g} steps were timed")
    return " and ".join(parts) or None


def design_effect(learned: LearnedState, task: str | None) -> float:
    """Return by how much the tokens of one request, which resemble each other, inflate variances."""
    sums = (RequestSums(*cell.sums) for cell in learned.requests if task in (None, cell.task))
    return effect_of([reduce(RequestSums.plus, sums, NO_REQUESTS)])


def effect_of(groups: Iterable[RequestSums]) -> float:
    """Return the design effect of groups of finished requests that may differ in acceptance, with its prior."""
    weight, total = TUNING.prior_requests, TUNING.prior_requests * TUNING.prior_effect
    for sums in groups:
        weight, total = weight + max(0.0, sums.n), total + _measured_effect(sums) * max(0.0, sums.n)
    return total / weight


def _measured_effect(sums: RequestSums) -> float:
    """Return the variance of the ratio accepted / drafts over requests (linearised), against independent drafts.

    The accepted length of a draft varies about as much as its mean allows.
    """
    if sums.d <= 0 or sums.a <= 0:
        return TUNING.prior_effect
    ratio = sums.a / sums.d
    between = max(0.0, sums.aa - 2 * ratio * sums.ad + ratio**2 * sums.dd) / sums.d
    return min(TUNING.prior_requests, max(1.0, between / (ratio * (1 + ratio))))


def _counts(learned: LearnedState, task: str | None, depth: int, parent: str) -> Hits:
    cells = (cell for cell in learned.acceptance if (cell.depth, cell.parent) == (depth, parent))
    return reduce(Hits.plus, (Hits(c.hits, c.total, c.ranks) for c in cells if task in (None, c.task)), NO_HITS)


def _posterior(counts: Hits, prior_mean: float, prior_weight: float, effect: float) -> Estimate:
    """Return the Beta posterior. For the variance, ``effect`` drafts count as one."""
    mean = (counts.hits + prior_mean * prior_weight) / (counts.total + prior_weight)
    mean = min(1 - TUNING.least_share, max(TUNING.least_share, mean))
    weight = counts.total / effect
    return Estimate(mean, mean * (1 - mean) / (weight + prior_weight + 1), weight)


def _by_rank(first: Estimate, counts: Hits, effect: float, top_k: int) -> tuple[Estimate, ...]:
    """Return the rates of ranks 0..``top_k`` - 1. Later ranks share the misses; none is better than the one before."""
    found, misses = [first], max(0.0, counts.total - counts.hits)
    for rank in range(1, top_k):
        count = counts.ranks[rank - 1] if rank <= len(counts.ranks) else 0.0
        prior = TUNING.rank_share * 0.5 ** (rank - 1) * TUNING.prior_drafts
        share = min(1.0, (count + prior) / (misses + TUNING.prior_drafts))
        own = share * (1 - share) / (misses / effect + TUNING.prior_drafts + 1)
        variance = (1 - first.mean) ** 2 * own + share**2 * first.variance
        mean = max(TUNING.least_share, min(found[-1].mean, (1 - first.mean) * share))
        found.append(Estimate(mean, variance, misses / effect))
    return tuple(found)
