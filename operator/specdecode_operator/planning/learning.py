"""Update the estimates with the measurements of one poll; estimates without new measurements stay. Pure.

Estimates belong to a draft; `state.draft_estimates` parks and restores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Literal, TypeVar

from specdecode_operator.planning.acceptance_model import design_effect
from specdecode_operator.planning.estimates import joined, kept_share, rate_changed, time_changed
from specdecode_operator.planning.loads import observed_load
from specdecode_operator.planning.tuning import TUNING
from specdecode_operator.state.learned import (
    AcceptanceCell,
    ContextCell,
    LearnedState,
    RequestCell,
    StepTimeCell,
    TrafficCell,
    parked_of,
    rounded,
    with_draft,
    with_parked,
)
from specdecode_operator.telemetry import counters
from specdecode_operator.telemetry.counters import CellKey, Delta, Hits, Moments, RequestSums, TrafficSums
from specdecode_worker.contract import OTHER_TASK, Buckets, Report

Cell = TypeVar("Cell", AcceptanceCell, ContextCell)
Key = tuple[str, int, Literal["main", "sibling"]]
"""Task, depth, and parent of an acceptance rate."""


def learn(learned: LearnedState, delta: Delta, *, now: float) -> LearnedState:
    """Return ``learned`` with the estimates updated by ``delta``, which is of the draft that most workers run."""
    if delta.draft and delta.draft != learned.draft:
        learned = with_draft(learned, delta.draft)
    return learned.model_copy(
        update={
            **_of_draft(learned, delta, now),
            "traffic": tuple(_traffic(learned.traffic, delta)),
            "prefill": _prefill(learned.prefill, delta),
            "wander": _wander(learned, delta),
            "load": observed_load(learned.load, delta, now),
        }
    )


def learn_parked(learned: LearnedState, draft: str, delta: Delta, now: float) -> LearnedState:
    """Return ``learned`` with the parked estimates of ``draft`` updated by ``delta``.

    Only acceptance, requests and step times with draft passes change. The draft becomes the most recently used one.
    """
    if not draft or draft == learned.draft or not (delta.acceptance or delta.siblings or delta.requests or delta.steps):
        return learned
    known = parked_of(learned, draft)
    own = learned.model_copy(
        update={
            "acceptance": known.acceptance,
            "contexts": known.contexts,
            "requests": known.requests,
            "costs": known.costs,
        }
    )
    drafted = replace(delta, steps={key: moments for key, moments in delta.steps.items() if key.draft_passes})
    updated = known.model_copy(update=_of_draft(own, drafted, now))
    return with_parked(learned, updated) if updated != known else learned


def learn_first_reports(
    learned: LearnedState, reports: Sequence[Report], found: Buckets, *, now: float
) -> LearnedState:
    """Return ``learned`` with what the first reports of workers contain, where nothing is known yet.

    Workers time steps before they serve. These count for few steps, and their made-up text says nothing of acceptance.
    That of the draft's evaluation counts for as few drafts.
    """
    if not learned.acceptance:
        agreements = (report.draft.agreement for report in reports if report.draft.hash == learned.draft)
        evaluated = tuple(_evaluated(next(filter(None, agreements), ()), now))
        learned = learned.model_copy(update={"acceptance": evaluated}) if evaluated else learned
    measured = counters.summed(
        (CellKey.of(cell), Moments.of_cell(cell))
        for report in reports
        for cell in report.steps
        if report.plan.buckets == found and (not cell.draft_passes or report.draft.hash == learned.draft)
        if 2 * cell.count >= TUNING.min_samples and cell.t > TUNING.least_seconds * cell.count and not cell.prefill
    )
    costs = {CellKey.of(cell): cell for cell in learned.costs}
    new = measured.keys() - costs.keys()
    for key in new:
        light = measured[key].times(min(1.0, 2 * TUNING.min_samples / measured[key].count))
        values = light.with_emitted(0.0).values if key.draft_passes else light.values
        made_up = light.count if key.draft_passes else 0.0
        costs[key] = StepTimeCell(**key._asdict(), values=values, at=now, made_up=made_up)
    return learned.model_copy(update={"costs": tuple(costs[key] for key in sorted(costs))}) if new else learned


def _evaluated(agreement: tuple[float, ...], now: float) -> Iterable[AcceptanceCell]:
    """Yield the acceptance that a draft's evaluation recorded, of a chain that few drafts began."""
    total = 2 * TUNING.min_samples
    for depth, rate in enumerate(agreement, start=1):
        yield AcceptanceCell(task=OTHER_TASK, depth=depth, hits=rounded(rate * total), total=rounded(total), at=now)
        total *= rate


def _of_draft(learned: LearnedState, delta: Delta, now: float) -> dict[str, object]:
    # Evidence is new for at least two polls, however long they are.
    recent = now - max(TUNING.recent_seconds, 2 * delta.seconds)
    return {
        "acceptance": tuple(_acceptance(learned, delta, now, recent)),
        "contexts": tuple(_contexts(learned, delta, now, recent)),
        "requests": tuple(_requests(learned.requests, delta)),
        "costs": tuple(_step_times(learned, delta, now, recent)),
    }


def _acceptance(learned: LearnedState, delta: Delta, now: float, recent: float) -> Iterable[AcceptanceCell]:
    """Yield the acceptance counts. A change at one depth makes the task's deeper counts doubtful."""
    cells: dict[Key, AcceptanceCell] = {(cell.task, cell.depth, cell.parent): cell for cell in learned.acceptance}
    fresh: dict[Key, Hits] = {(*at, "main"): hits for at, hits in delta.acceptance.items() if hits.total > 0}
    fresh |= {(*at, "sibling"): hits for at, hits in delta.siblings.items() if hits.total > 0}
    effects = {task: design_effect(learned, task) for task, _, _ in fresh}
    changed: dict[str, int] = {}
    for key in sorted({*cells, *fresh}):
        task, depth, parent = key
        cell = cells.get(key) or AcceptanceCell(task=task, depth=depth, parent=parent, hits=0, total=0, at=now)
        if depth > changed.get(task, depth):
            cell = _doubted(cell)
        if key in fresh:
            cell = _updated(cell, fresh[key], effects[task], now, recent)
            if parent == "main" and cell.changed_at == now:
                changed.setdefault(task, depth)
        yield cell


def _contexts(learned: LearnedState, delta: Delta, now: float, recent: float) -> Iterable[ContextCell]:
    """Yield the acceptance of first draft tokens by task and context."""
    cells = {(cell.task, cell.context): cell for cell in learned.contexts}
    for (task, context), hits in delta.contexts.items():
        if hits.total > 0:
            new = ContextCell(task=task, depth=1, context=context, hits=0, total=0, at=now)
            known = cells.get((task, context), new)
            cells[task, context] = _updated(known, hits, design_effect(learned, task), now, recent)
    return (cells[key] for key in sorted(cells))


def _doubted(cell: AcceptanceCell) -> AcceptanceCell:
    """Return the counts with the weight of one draft.

    Acceptance falls at all depths together, and deeper tokens are drafted too seldom to show it soon.
    """
    if cell.total <= 1:
        return cell
    values = {name: rounded(getattr(cell, name) / cell.total) for name in ("hits", "new_hits", "new_total")}
    return cell.model_copy(update={**values, "total": 1.0, "ranks": _ranks(count / cell.total for count in cell.ranks)})


def _updated(known: Cell, fresh: Hits, effect: float, now: float, recent: float) -> Cell:
    """Return the counts with those of this poll. Counts are new if the last ones came after ``recent``."""
    gathered = Hits(known.new_hits, known.new_total) if known.at > recent else counters.NO_HITS
    keep = kept_share(fresh.total, now - known.at, TUNING.half_life_drafts * effect)
    before = Hits(known.hits, known.total, known.ranks)
    after, new, changed = joined(before, gathered, fresh, keep, partial(rate_changed, effect=effect))
    # New evidence that did not contradict the older within these drafts is no longer counted apart.
    new = new if new.total < TUNING.prior_drafts * TUNING.prior_effect * effect else counters.NO_HITS
    counts = {"hits": after.hits, "total": after.total, "new_hits": new.hits, "new_total": new.total}
    update = {name: rounded(count) for name, count in counts.items()}
    changed_at = now if changed else known.changed_at
    return known.model_copy(update={**update, "ranks": _ranks(after.ranks), "at": now, "changed_at": changed_at})


def _ranks(counts: Iterable[float]) -> tuple[float, ...]:
    """Return the counts rounded, without trailing zeros."""
    found = [max(0.0, round(rounded(count), 1)) for count in counts]
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def _requests(known: Iterable[RequestCell], delta: Delta) -> Iterable[RequestCell]:
    cells = {cell.task: RequestSums(*cell.sums) for cell in known}
    for task, fresh in delta.requests.items():
        keep = 0.5 ** (fresh.n / TUNING.half_life_samples)
        cells[task] = cells.get(task, counters.NO_REQUESTS).times(keep).plus(fresh)
    return (RequestCell(task=task, sums=RequestSums(*map(rounded, cells[task]))) for task in sorted(cells))


def _traffic(known: Iterable[TrafficCell], delta: Delta) -> Iterable[TrafficCell]:
    """Yield the traffic by task. All tasks decay by the requests of all, so that a task without requests fades out."""
    cells = {cell.task: TrafficSums(*cell.sums) for cell in known}
    count = sum(max(0.0, fresh.arrivals, fresh.finished) for fresh in delta.traffic.values())
    keep = kept_share(count, delta.seconds, TUNING.half_life_samples)
    for task in sorted({*cells, *delta.traffic}):
        sums = cells.get(task, counters.NO_TRAFFIC).times(keep).plus(delta.traffic.get(task, counters.NO_TRAFFIC))
        yield TrafficCell(task=task, sums=TrafficSums(*(rounded(max(0.0, value)) for value in sums)))


def _step_times(learned: LearnedState, delta: Delta, now: float, recent: float) -> Iterable[StepTimeCell]:
    """Return the step times. Steps with prefill say nothing about decoding."""
    cells = {CellKey.of(cell): cell for cell in learned.costs}
    for key, fresh in delta.steps.items():
        if not key.prefill and fresh.count > 0 and fresh.seconds > TUNING.least_seconds * fresh.count:
            known = cells.get(key) or StepTimeCell(**key._asdict(), values=fresh.times(0).values, at=now, polls=0)
            cells[key] = _step_time(known, fresh, now, learned.wander, recent)
    return (cells[key] for key in sorted(cells))


def _step_time(known: StepTimeCell, fresh: Moments, now: float, wander: float, recent: float) -> StepTimeCell:
    before, is_recent = Moments(known.values), known.new_values and known.at > recent
    gathered = Moments(known.new_values) if is_recent else fresh.times(0)
    # Where means wander by more than twice the model's error, an estimate must cover more polls.
    stretch = max(1.0, wander / (2 * TUNING.model_error) ** 2)
    keep = kept_share(fresh.count, now - known.at, TUNING.half_life_samples) ** (1 / stretch)
    after, new, changed = joined(before, gathered, fresh, keep, partial(time_changed, wander=wander))
    left = max(0.0, after.count - fresh.count) / before.count if before.count > 0 else 0.0
    return known.model_copy(
        update={
            "values": tuple(map(rounded, after.values)),
            "at": now,
            "new_values": tuple(map(rounded, new.values)) if new.count < TUNING.min_samples else (),
            "polls": rounded(1 + left * known.polls),
            "changed_at": now if changed else known.changed_at,
            "made_up": rounded(left * known.made_up),
        }
    )


def _wander(learned: LearnedState, delta: Delta) -> float:
    """Return the relative variance of means from poll to poll beyond noise.

    A single jump is a change and no wander, so one poll counts for little more than what is usual.
    """
    most = min(1.0, max(TUNING.carried_error**2, TUNING.wander_limit * learned.wander))
    known = {CellKey.of(cell): Moments(cell.values) for cell in learned.costs}
    excesses, weights = list[float](), list[float]()
    for key, fresh in delta.steps.items():
        if not key.prefill and key in known and known[key].count >= TUNING.min_samples and fresh.count > 2:
            before = known[key]
            noise = before.variance / before.count + max(before.variance, fresh.variance) / fresh.count
            excess = (before.mean_seconds - fresh.mean_seconds) ** 2 - noise
            excesses.append(fresh.seconds * min(most, max(0.0, excess) / before.mean_seconds**2))
            weights.append(fresh.seconds)
    if not weights:
        return learned.wander
    return rounded(learned.wander + TUNING.wander_share * (sum(excesses) / sum(weights) - learned.wander))


def _prefill(known: tuple[float, ...], delta: Delta) -> tuple[float, ...]:
    """Return the moments of all steps with prefill together."""
    fresh = [moments for key, moments in delta.steps.items() if key.prefill and moments.count > 0]
    if not fresh:
        return known
    total = reduce(Moments.plus, fresh)
    keep = 0.5 ** (total.count / TUNING.half_life_samples)
    return tuple(map(rounded, (Moments(known).times(keep).plus(total) if known else total).values))
