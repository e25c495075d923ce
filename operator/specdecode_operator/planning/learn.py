"""Update the estimates with the measurements of one poll; estimates without new measurements stay. Pure.

Estimates belong to a draft. When the current draft changes, those of the old draft are parked, and those of the new
draft are restored if they are known, so that a rollback or a canary loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

from specdecode_operator.planning.acceptance import design_effect
from specdecode_operator.planning.change import rate_changed
from specdecode_operator.planning.forgetting import apart, is_recent, joined, kept_share, short
from specdecode_operator.planning.learn_steps import learn_costs, learn_prefill, learn_wander
from specdecode_operator.state.learned import (
    AcceptanceCell,
    DraftEstimates,
    LearnedState,
    LoadState,
    RequestCell,
    RowState,
    StepTimeCell,
    TrafficCell,
)
from specdecode_operator.state.sections import MAX_PARKED_DRAFTS
from specdecode_operator.telemetry.counters import (
    NO_HITS,
    NO_REQUESTS,
    NO_TRAFFIC,
    CellKey,
    Hits,
    RequestSums,
    TrafficSums,
)
from specdecode_operator.telemetry.deltas import Delta
from specdecode_worker.contract import FEATURES

HALF_LIFE_DRAFTS = 300.0
HALF_LIFE_REQUESTS = 200.0
SETTLED_DRAFTS = 40.0
"""Number of new drafts after which they are no longer counted apart, if they did not contradict the older ones.
For steps the number is change.LEAST_STEPS."""
LEAST_STEPS_OF_LOAD, LEAST_SECONDS_OF_LOAD = 10, 1.0
"""A poll with fewer steps and less time in them does not update the load."""
DEEPER_WEIGHT = 1.0
"""Weight, in drafts, of older evidence where the acceptance of a shallower depth has changed. It is far less than the
weight of the depth above (acceptance.DEPTH_WEIGHT), because acceptance usually falls at all depths together."""
RANK_DIGITS = 3
LEAST_RANK = 0.05
"""Decayed counts below this are rounded to zero."""
HALF_LIFE_ARRIVALS = 100.0

_SEQUENCES = FEATURES.index("sequences")

Parent = Literal["main", "sibling"]


def learn(learned: LearnedState, delta: Delta, *, now: float) -> LearnedState:
    """Return ``learned`` with the estimates updated by ``delta``, which is of the draft that most workers run."""
    if delta.draft and delta.draft != learned.draft:
        learned = _with_draft(learned, delta.draft)
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


def learn_parked(learned: LearnedState, draft: str, delta: Delta, now: float) -> LearnedState:
    """Return ``learned`` with the parked estimates of ``draft`` updated by ``delta``.

    Only acceptance, requests and step times with draft passes of that draft change; they become the most recently
    used. A draft that is not parked yet starts from nothing. The current draft is updated by ``learn`` alone.

    Args:
        learned: State before.
        draft: Hash of a draft that some workers run and that is not the current one.
        delta: Measurements of these workers.
        now: Time in seconds since the epoch.
    """
    if not draft or draft == learned.draft or not (delta.acceptance or delta.siblings or delta.requests or delta.steps):
        return learned
    known = next((parked for parked in learned.parked if parked.draft == draft), DraftEstimates(draft=draft))
    own = learned.model_copy(update={"acceptance": known.acceptance, "requests": known.requests, "costs": known.costs})
    drafted = {key: moments for key, moments in delta.steps.items() if key.draft_passes}
    updated = known.model_copy(
        update={
            "acceptance": tuple(_acceptance(own, delta, now)),
            "requests": tuple(_requests(known.requests, delta)),
            "costs": tuple(learn_costs(own, replace(delta, steps=drafted), now)),
        }
    )
    return _with_parked(learned, updated) if updated != known else learned


def _with_draft(learned: LearnedState, draft: str) -> LearnedState:
    """Return ``learned`` with ``draft`` as the current draft: restored if it is parked, else from nothing.

    Step times without draft passes do not depend on the draft and stay.
    """
    old = DraftEstimates(
        draft=learned.draft,
        acceptance=tuple(map(_settled_acceptance, learned.acceptance)),
        requests=learned.requests,
        costs=tuple(_settled_cost(cell) for cell in learned.costs if cell.draft_passes),
        rows=tuple(map(_settled_row, learned.rows)),
    )
    if old.draft and (old.acceptance or old.requests or old.costs or old.rows):
        learned = _with_parked(learned, old)
    new = next((parked for parked in learned.parked if parked.draft == draft), DraftEstimates(draft=draft))
    plain = (cell for cell in learned.costs if not cell.draft_passes)
    return learned.model_copy(
        update={
            "draft": draft,
            "rows": new.rows,
            "acceptance": new.acceptance,
            "requests": new.requests,
            "costs": tuple(sorted((*plain, *new.costs), key=CellKey.of)),
            "parked": tuple(parked for parked in learned.parked if parked.draft != draft),
        }
    )


def _with_parked(learned: LearnedState, estimates: DraftEstimates) -> LearnedState:
    """Return ``learned`` with these estimates parked first; the least recently used of too many are dropped."""
    others = (parked for parked in learned.parked if parked.draft != estimates.draft)
    return learned.model_copy(update={"parked": (estimates, *others)[:MAX_PARKED_DRAFTS]})


def _settled_acceptance(cell: AcceptanceCell) -> AcceptanceCell:
    """Return the cell without its test for recent changes, which is void after a pause."""
    return cell.model_copy(update={"new_hits": 0.0, "new_total": 0.0, "changed_at": 0.0})


def _settled_cost(cell: StepTimeCell) -> StepTimeCell:
    return cell.model_copy(update={"new_values": (), "spell_at": 0.0, "changed_at": 0.0})


def _settled_row(row: RowState) -> RowState:
    """Return the row without the changes of the last hour."""
    return row.model_copy(update={"moves": ()})


def _acceptance(learned: LearnedState, delta: Delta, now: float) -> Iterable[AcceptanceCell]:
    effects = {task: design_effect(learned, task) for task, _ in (*delta.acceptance, *delta.siblings)}
    cells = {(cell.task, cell.depth, cell.parent): cell for cell in _doubted(learned.acceptance, delta, effects, now)}
    parents: tuple[Parent, Parent] = ("main", "sibling")
    for parent, rates in zip(parents, (delta.acceptance, delta.siblings), strict=True):
        for (task, depth), fresh in rates.items():
            if fresh.total > 0:
                key = (task, depth, parent)
                cells[key] = _depth(cells.get(key), key, fresh, effects[task], now)
    return (cells[key] for key in sorted(cells))


def _doubted(
    known: Iterable[AcceptanceCell], delta: Delta, effects: Mapping[str, float], now: float
) -> Iterable[AcceptanceCell]:
    """Yield the cells, with less weight for the depths below one whose acceptance has changed.

    Deeper tokens are drafted less often, so that their own evidence would show the change late.
    """
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
    """Return the known counts, the new part of them, the counts of this poll, and the share of the old that stays.

    The share is larger where the drafts of one request resemble each other (``effect``), because an estimate must
    cover more than one or two requests.
    """
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
    """Return the counts rounded, without trailing counts below LEAST_RANK."""
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
    """Yield the traffic by task. All tasks decay by the requests of all, so that a task without requests fades out."""
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
    """Return the load of this poll, or ``known`` if the poll had too few steps."""
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
