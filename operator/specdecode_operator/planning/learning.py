"""Update the estimates with the measurements of one poll; estimates without new measurements stay. Pure.

Estimates belong to a draft; `state.draft_estimates` parks and restores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

from specdecode_operator.planning.acceptance_model import design_effect
from specdecode_operator.planning.estimates import apart, joined, kept_share, rate_changed, short, shorts, time_changed
from specdecode_operator.planning.loads import observed_load
from specdecode_operator.planning.step_time_model import LEAST_SECONDS
from specdecode_operator.planning.tuning import TUNING
from specdecode_operator.state import cells as stored
from specdecode_operator.state.cells import AcceptanceCell, StepTimeCell
from specdecode_operator.state.draft_estimates import parked_of, with_draft, with_parked
from specdecode_operator.state.learned import LearnedState
from specdecode_operator.telemetry import counters
from specdecode_operator.telemetry.counters import CellKey, Hits, Moments
from specdecode_operator.telemetry.deltas import Delta
from specdecode_worker.contract import FEATURES, Buckets, Report

MAX_WANDER = 0.25
"""Relative variance of a poll's mean step time beyond which it counts as no more."""
_SEQUENCES = FEATURES.index("sequences")
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
    own = learned.model_copy(update={"acceptance": known.acceptance, "requests": known.requests, "costs": known.costs})
    drafted = replace(delta, steps={key: moments for key, moments in delta.steps.items() if key.draft_passes})
    updated = known.model_copy(update=_of_draft(own, drafted, now))
    return with_parked(learned, updated) if updated != known else learned


def learn_first_reports(
    learned: LearnedState, reports: Iterable[Report], found: Buckets, *, now: float
) -> LearnedState:
    """Return ``learned`` with the step times that the first reports of workers contain, for kinds not known yet.

    Workers time steps before they serve. These count for few steps, and their made-up text says nothing of acceptance.
    """
    measured = counters.summed(
        (CellKey.of(cell), Moments.of_cell(cell))
        for report in reports
        for cell in report.steps
        if report.plan.buckets == found
        if cell.count >= TUNING.min_samples / 2 and cell.t > LEAST_SECONDS * cell.count and not cell.prefill
        if not cell.draft_passes or report.draft.hash == learned.draft
    )
    costs = {CellKey.of(cell): cell for cell in learned.costs}
    for key in measured.keys() - costs.keys():
        light = measured[key].times(min(1.0, 3 * TUNING.min_samples / measured[key].count))
        values = light.with_emitted(0.0).values if key.draft_passes else light.values
        made_up = light.count if key.draft_passes else 0.0
        costs[key] = StepTimeCell(**key._asdict(), values=values, at=now, made_up=made_up)
    is_same = len(costs) == len(learned.costs)
    return learned if is_same else learned.model_copy(update={"costs": tuple(costs[key] for key in sorted(costs))})


def _of_draft(learned: LearnedState, delta: Delta, now: float) -> dict[str, object]:
    return {
        "acceptance": tuple(_acceptance(learned, delta, now)),
        "requests": tuple(_requests(learned.requests, delta)),
        "costs": tuple(_step_times(learned, delta, now)),
    }


def _acceptance(learned: LearnedState, delta: Delta, now: float) -> Iterable[AcceptanceCell]:
    effects = {task: design_effect(learned, task) for task, _ in (*delta.acceptance, *delta.siblings)}
    cells: dict[Key, AcceptanceCell] = {(cell.task, cell.depth, cell.parent): cell for cell in learned.acceptance}
    fresh: dict[Key, Hits] = {(*at, "main"): hits for at, hits in delta.acceptance.items() if hits.total > 0}
    now_and_recent = now, now - _recent_seconds(delta)
    _doubt_deeper(cells, fresh, effects, *now_and_recent)
    fresh |= {(*at, "sibling"): hits for at, hits in delta.siblings.items() if hits.total > 0}
    cells |= {key: _updated(key, cells.get(key), hits, effects[key[0]], *now_and_recent) for key, hits in fresh.items()}
    return (cells[key] for key in sorted(cells))


def _doubt_deeper(
    cells: dict[Key, AcceptanceCell], fresh: Mapping[Key, Hits], effects: Mapping[str, float], now: float, recent: float
) -> None:
    """Reduce the depths below one whose acceptance has changed to the weight of a draft.

    Acceptance falls at all depths together, and deeper tokens are drafted too seldom to show it soon.
    """
    changed: dict[str, int] = {}
    for (task, depth, parent), hits in fresh.items():
        evidence = _evidence(cells.get((task, depth, parent)), hits, effects[task], now, recent)
        if rate_changed(*apart(*evidence), effects[task]):
            changed[task] = min(depth, changed.get(task, depth))
    for key, cell in cells.items():
        if cell.depth > changed.get(cell.task, cell.depth) and cell.total > 1:
            values = {name: short(getattr(cell, name) / cell.total) for name in ("hits", "new_hits", "new_total")}
            ranks = _ranks(count / cell.total for count in cell.ranks)
            cells[key] = cell.model_copy(update={**values, "total": 1.0, "ranks": ranks})


def _evidence(
    known: AcceptanceCell | None, fresh: Hits, effect: float, now: float, recent: float
) -> tuple[Hits, Hits, Hits, float]:
    """Return the known counts, their new part, those of this poll, and the share of the known ones that stays.

    Counts are new if the last ones came after ``recent``.
    """
    if known is None:
        return counters.NO_HITS, counters.NO_HITS, fresh, 1.0
    gathered = Hits(known.new_hits, known.new_total) if known.at > recent else counters.NO_HITS
    keep = kept_share(fresh.total, now - known.at, TUNING.half_life_drafts * effect)
    return Hits(known.hits, known.total, known.ranks), gathered, fresh, keep


def _updated(
    key: Key, known: AcceptanceCell | None, fresh: Hits, effect: float, now: float, recent: float
) -> AcceptanceCell:
    after, new, changed = joined(*_evidence(known, fresh, effect, now, recent), partial(rate_changed, effect=effect))
    # New evidence that did not contradict the older within these drafts is no longer counted apart.
    new = new if new.total < TUNING.prior_drafts * TUNING.prior_effect * effect else counters.NO_HITS
    return AcceptanceCell(
        task=key[0],
        depth=key[1],
        parent=key[2],
        hits=short(after.hits),
        total=short(after.total),
        ranks=_ranks(after.ranks),
        at=now,
        new_hits=short(new.hits),
        new_total=short(new.total),
        changed_at=now if changed else known.changed_at if known else 0,
    )


def _ranks(counts: Iterable[float]) -> tuple[float, ...]:
    """Return the counts rounded, without trailing zeros."""
    rounded = [max(0.0, round(float(f"{count:.3g}"), 1)) for count in counts]
    while rounded and not rounded[-1]:
        rounded.pop()
    return tuple(rounded)


def _requests(known: Iterable[stored.RequestCell], delta: Delta) -> Iterable[stored.RequestCell]:
    cells = {cell.task: counters.RequestSums(*cell.sums) for cell in known}
    for task, fresh in delta.requests.items():
        cells[task] = (
            cells.get(task, counters.NO_REQUESTS).times(0.5 ** (fresh.n / TUNING.half_life_requests)).plus(fresh)
        )
    for task in sorted(cells):
        yield stored.RequestCell(task=task, sums=counters.RequestSums(*map(short, cells[task])))


def _traffic(known: Iterable[stored.TrafficCell], delta: Delta) -> Iterable[stored.TrafficCell]:
    """Yield the traffic by task. All tasks decay by the requests of all, so that a task without requests fades out."""
    cells = {cell.task: counters.TrafficSums(*cell.sums) for cell in known}
    count = sum(max(0.0, fresh.arrivals, fresh.finished) for fresh in delta.traffic.values())
    keep = kept_share(count, delta.seconds, TUNING.half_life_requests) if count else 1.0
    for task in sorted({*cells, *delta.traffic}):
        sums = cells.get(task, counters.NO_TRAFFIC).times(keep).plus(delta.traffic.get(task, counters.NO_TRAFFIC))
        positive = (short(max(0.0, value)) for value in sums)
        yield stored.TrafficCell(task=task, sums=counters.TrafficSums(*positive))


def _step_times(learned: LearnedState, delta: Delta, now: float) -> Iterable[StepTimeCell]:
    """Return the step times. Steps with prefill say nothing about decoding."""
    cells = {CellKey.of(cell): cell for cell in learned.costs}
    for key, fresh in delta.steps.items():
        if not key.prefill and fresh.count > 0 and fresh.seconds > LEAST_SECONDS * fresh.count:
            cells[key] = _step_time(cells.get(key), key, fresh, now, learned.wander, now - _recent_seconds(delta))
    return (cells[key] for key in sorted(cells))


def _step_time(
    known: StepTimeCell | None, key: CellKey, fresh: Moments, now: float, wander: float, recent: float
) -> StepTimeCell:
    known = known or StepTimeCell(**key._asdict(), values=fresh.times(0).values, at=now, polls=0)
    before, is_recent = Moments(known.values), known.new_values and known.at > recent
    gathered = Moments(known.new_values) if is_recent else fresh.times(0)
    # Where means wander by more than twice the model's error, an estimate must cover more polls.
    stretch = max(1.0, wander / (2 * TUNING.model_error) ** 2)
    keep = kept_share(fresh.count, now - known.at, TUNING.half_life_steps) ** (1 / stretch)
    after, new, changed = joined(before, gathered, fresh, keep, partial(time_changed, wander=wander))
    left = max(0.0, after.count - fresh.count) / before.count if before.count > 0 else 0.0
    return StepTimeCell(
        **key._asdict(),
        values=shorts(after.values),
        at=now,
        new_values=shorts(new.values) if new.count < TUNING.min_samples else (),
        polls=short(1 + left * known.polls),
        changed_at=now if changed else known.changed_at,
        made_up=short(left * known.made_up),
    )


def _recent_seconds(delta: Delta) -> float:
    """Return how long evidence is new: at least three polls, however long they are."""
    return max(TUNING.recent_seconds, 3 * delta.seconds)


def _wander(learned: LearnedState, delta: Delta) -> float:
    """Return the relative variance of means from poll to poll beyond noise.

    A single jump is a change and no wander, so one poll counts for at most four times what is usual.
    """
    most = min(MAX_WANDER, max(TUNING.carried_error**2, 4 * learned.wander))
    known = {CellKey.of(cell): Moments(cell.values) for cell in learned.costs}
    squares = [
        (min(most, _excess(known[key], fresh)), fresh.seconds)
        for key, fresh in delta.steps.items()
        if not key.prefill and key in known and known[key].count >= TUNING.min_samples and fresh.count >= 3
    ]
    seconds = sum(weight for _, weight in squares)
    if not seconds:
        return learned.wander
    mean = sum(square * weight for square, weight in squares) / seconds
    return short(learned.wander + TUNING.wander_share * (mean - learned.wander))


def _excess(before: Moments, fresh: Moments) -> float:
    """Return the squared relative error of the old mean, less its noise."""
    gap = (before.mean_seconds - fresh.mean_seconds) ** 2
    noise = before.variance / before.count + max(before.variance, fresh.variance) / fresh.count
    return max(0.0, gap - noise) / before.mean_seconds**2


def _prefill(known: tuple[float, ...], delta: Delta) -> tuple[float, ...]:
    """Return the moments of all steps with prefill together."""
    total = Moments(known) if known else None
    for moments in (moments for key, moments in delta.steps.items() if key.prefill and moments.count > 0):
        keep = 0.5 ** (moments.count / TUNING.half_life_steps)
        total = total.times(keep).plus(moments) if total else moments
    return shorts(total.values) if total else ()
