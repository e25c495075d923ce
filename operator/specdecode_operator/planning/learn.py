"""Moves the estimates by what one poll brought. An estimate that nothing new is known of stays. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Literal

from specdecode_operator.planning.acceptance import design_effect
from specdecode_operator.planning.change import rate_changed
from specdecode_operator.planning.forgetting import apart, is_recent, joined, kept_share, short
from specdecode_operator.planning.learn_steps import learn_costs, learn_prefill, learn_wander
from specdecode_operator.state.learned import AcceptanceCell, LearnedState, LoadState, RequestCell, TrafficCell
from specdecode_operator.telemetry.counters import NO_HITS, NO_REQUESTS, NO_TRAFFIC, Hits, RequestSums, TrafficSums
from specdecode_operator.telemetry.deltas import Delta
from specdecode_worker.contract import FEATURES

HALF_LIFE_DRAFTS = 300.0
HALF_LIFE_REQUESTS = 200.0
SETTLED_DRAFTS = 40.0
"""So many new drafts that did not contradict the older ones no longer stand apart; of steps, LEAST_STEPS of change."""
LEAST_STEPS_OF_LOAD, LEAST_SECONDS_OF_LOAD = 10, 1.0
"""A poll with fewer steps in less time says nothing about the load."""
DEEPER_WEIGHT = 1.0
"""Drafts that older evidence counts for where the acceptance of a shallower depth has changed: far less than what the
depth above says (acceptance.DEPTH_WEIGHT), for who accepts less at first hardly accepts as much as ever later."""
RANK_DIGITS = 3
LEAST_RANK = 0.05
"""A decayed count that is less than this says nothing."""
HALF_LIFE_ARRIVALS = 100.0

_SEQUENCES = FEATURES.index("sequences")

Parent = Literal["main", "sibling"]


def learn(learned: LearnedState, delta: Delta, *, now: float) -> LearnedState:
    """``learned`` with the estimates moved."""
    if delta.draft and delta.draft != learned.draft:
        learned = _of_new_draft(learned, delta.draft)
    return learned.model_copy(
        update={
            "acceptance": tuple(_acceptance(learned, delta, now)),
            "requests": tuple(_requests(learned.requests, delta)),
            "traffic": tuple(_traffic(learned.traffic, delta)),
            "prefill": learn_prefill(learned.prefill, delta),
            "costs": tuple(learn_costs(learned, delta, now)),
            "wander": learn_wander(learned, delta),
            "load": _load(learned.load, delta, now),
        }
    )


def _of_new_draft(learned: LearnedState, draft: str) -> LearnedState:
    """A new draft starts from nothing and at depth.initial; but plain steps cost what they did."""
    plain = tuple(cell for cell in learned.costs if cell.draft_passes == 0)
    return learned.model_copy(update={"draft": draft, "rows": (), "acceptance": (), "requests": (), "costs": plain})


def _acceptance(learned: LearnedState, delta: Delta, now: float) -> Iterable[AcceptanceCell]:
    effects = {task: design_effect(learned, task) for task, _ in (*delta.acceptance, *delta.siblings)}
    cells = {(cell.task, cell.depth, cell.parent): cell for cell in _doubted(learned.acceptance, delta, effects, now)}
    parents: tuple[Parent, Parent] = ("main", "sibling")
    for parent, found in zip(parents, (delta.acceptance, delta.siblings), strict=True):
        for (task, depth), fresh in found.items():
            if fresh.total > 0:
                key = (task, depth, parent)
                cells[key] = _depth(cells.get(key), key, fresh, effects[task], now)
    return (cells[key] for key in sorted(cells))


def _doubted(
    known: Iterable[AcceptanceCell], delta: Delta, effects: Mapping[str, float], now: float
) -> Iterable[AcceptanceCell]:
    """A change at one depth takes weight from what is known of the deeper ones of that task: they are seen seldom."""
    changed: dict[str, int] = {}
    for cell in known:
        fresh = delta.acceptance.get((cell.task, cell.depth), NO_HITS)
        if cell.parent != "main" or fresh.total <= 0:
            continue
        if rate_changed(*apart(*_evidence(cell, fresh, effects[cell.task], now)), effects[cell.task]):
            changed[cell.task] = min(cell.depth, changed.get(cell.task, cell.depth))
    for cell in known:
        share = (
            min(1.0, DEEPER_WEIGHT / max(1e-9, cell.total)) if cell.depth > changed.get(cell.task, cell.depth) else 1
        )
        yield cell if share == 1 else _lighter(cell, share)


def _lighter(cell: AcceptanceCell, share: float) -> AcceptanceCell:
    values = {name: short(share * getattr(cell, name)) for name in ("hits", "total", "new_hits", "new_total")}
    return cell.model_copy(update={**values, "ranks": _ranks(tuple(share * count for count in cell.ranks))})


def _evidence(known: AcceptanceCell | None, fresh: Hits, effect: float, now: float) -> tuple[Hits, Hits, Hits, float]:
    """What was known, what of it was new, what is new now, and the share of the old that is kept: longer where drafts
    of one request resemble each other, for an estimate must outlast a request or two."""
    before = Hits(known.hits, known.total, known.ranks) if known else NO_HITS
    gathered = Hits(known.new_hits, known.new_total) if known and is_recent(known.at, now) else NO_HITS
    return before, gathered, fresh, kept_share(fresh.total, now - known.at if known else 0, HALF_LIFE_DRAFTS * effect)


def _depth(
    known: AcceptanceCell | None, key: tuple[str, int, Parent], fresh: Hits, effect: float, now: float
) -> AcceptanceCell:
    after, new, changed = joined(*_evidence(known, fresh, effect, now), partial(rate_changed, effect=effect))
    still_new = new if new.total < SETTLED_DRAFTS * effect else NO_HITS
    return AcceptanceCell(
        task=key[0],
        depth=key[1],
        parent=key[2],
        hits=short(after.hits),
        total=short(after.total),
        ranks=_ranks(after.ranks),
        at=now,
        new_hits=short(still_new.hits),
        new_total=short(still_new.total),
        changed_at=now if changed else known.changed_at if known else 0,
    )


def _ranks(counts: tuple[float, ...]) -> tuple[float, ...]:
    """Rounded, without what stands for nothing at the end: most ranks of most cells."""
    rounded = [max(0.0, float(f"{count:.{RANK_DIGITS}g}")) for count in counts]
    while rounded and rounded[-1] < LEAST_RANK:
        rounded.pop()
    return tuple(rounded)


def _requests(known: Iterable[RequestCell], delta: Delta) -> Iterable[RequestCell]:
    cells = {cell.task: RequestSums(*cell.sums) for cell in known}
    for task, fresh in delta.requests.items():
        keep = 0.5 ** (fresh.n / HALF_LIFE_REQUESTS)
        cells[task] = cells.get(task, NO_REQUESTS).times(keep).plus(fresh)
    for task in sorted(cells):
        n, a, d, aa, ad, dd = map(short, cells[task])
        yield RequestCell(task=task, sums=(n, a, d, aa, ad, dd))


def _traffic(known: Iterable[TrafficCell], delta: Delta) -> Iterable[TrafficCell]:
    """All tasks forget alike, by what came in of any: a task that comes no more leaves the mix."""
    cells = {cell.task: TrafficSums(*cell.sums) for cell in known}
    count = sum(max(0.0, fresh.arrivals, fresh.finished) for fresh in delta.traffic.values())
    keep = kept_share(count, delta.seconds, HALF_LIFE_ARRIVALS) if count else 1.0
    for task in {*cells, *delta.traffic}:
        fresh = delta.traffic.get(task, NO_TRAFFIC)
        cells[task] = TrafficSums(*(max(0.0, value) for value in cells.get(task, NO_TRAFFIC).times(keep).plus(fresh)))
    for task in sorted(cells):
        arrivals, finished, prompt, cached, output = map(short, cells[task])
        yield TrafficCell(task=task, sums=(arrivals, finished, prompt, cached, output))


def _load(known: LoadState, delta: Delta, now: float) -> LoadState:
    """The load of this poll, if there was any worth the name."""
    decoding = {key: moments for key, moments in delta.steps.items() if not key.prefill}
    count = sum(moments.count for moments in decoding.values())
    if count < LEAST_STEPS_OF_LOAD and sum(moments.seconds for moments in decoding.values()) < LEAST_SECONDS_OF_LOAD:
        return known
    by_context: dict[int, float] = {}
    for key, moments in decoding.items():
        by_context[key.context_bucket] = by_context.get(key.context_bucket, 0) + moments.seconds
    tasks = {task: hits.total for (task, depth), hits in delta.acceptance.items() if depth == 1}
    sequences = sum(moments.x[_SEQUENCES] for moments in decoding.values()) / count
    return LoadState(
        sequences=short(sequences),
        context_bucket=max(by_context, key=lambda bucket: by_context[bucket]),
        task=max(tasks, key=lambda task: tasks[task]) if tasks else known.task,
        at=now,
    )
