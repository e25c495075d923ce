"""Moves the estimates by what one poll brought, with exponential forgetting.

Forgetting goes by the slower of two clocks, observations and seconds: a busy fleet averages over about ten seconds,
a quiet one over a few hundred observations. Where a batch contradicts the estimate beyond chance, the estimate gives
way at once, so that a step reaches the plan with the next poll. An estimate that nothing new is known of stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from typing import Literal, TypeVar

from specdecode_operator.measurements import (
    NO_HITS,
    NO_REQUESTS,
    NO_TRAFFIC,
    CellKey,
    Delta,
    Hits,
    Moments,
    RequestSums,
    TrafficSums,
)
from specdecode_operator.memory import CostMemory, DepthMemory, Kept, LoadMemory, RequestMemory, TrafficMemory
from specdecode_operator.planning.acceptance import design_effect
from specdecode_operator.planning.change import LEAST_STEPS, cost_changed, rate_changed
from specdecode_operator.planning.steptime import LEAST_SECONDS
from specdecode_worker.contract import FEATURES

HALF_LIFE_SECONDS = 20.0
"""Long against a poll and a machine's weather: what changes for good is told by contradiction, not by forgetting."""
HALF_LIFE_DRAFTS = 300.0
HALF_LIFE_STEPS = 128.0
SPELL_SECONDS = 60.0
"""Steps that were timed so far apart met another weather of the machine."""
HALF_LIFE_REQUESTS = 200.0
SETTLED_DRAFTS = 40.0
"""So many new drafts that did not contradict the older ones no longer stand apart; of steps, LEAST_STEPS."""
LEAST_STEPS_OF_POLL = 3
"""Slow steps come few to a poll; how far their mean wandered must be seen all the same."""
WANDER_SHARE = 0.1
"""Weight of one poll in the wander."""
MOST_OFF = 0.2
"""Relative error of a poll's mean beyond which it counts as no more."""
LEAST_STEPS_OF_LOAD, LEAST_SECONDS_OF_LOAD = 10, 1.0
"""A poll with fewer steps in less time says nothing about the load."""
GATHER_SECONDS = 15.0
"""What was new longer ago is new no more."""
CONTRADICTED_WEIGHT = 0.25
"""Weight of all older evidence that new evidence contradicts, as a share of the new."""
DEEPER_WEIGHT = 1.0
"""Drafts that older evidence counts for where the acceptance of a shallower depth has changed: far less than what the
depth above says (acceptance.DEPTH_WEIGHT), for who accepts less at first hardly accepts as much as ever later."""
DIGITS = 6
RANK_DIGITS = 3
LEAST_RANK = 0.05
"""A decayed count that is less than this says nothing."""
HALF_LIFE_ARRIVALS = 100.0
HALF_LIFE_PREFILL_STEPS = 100.0

_SEQUENCES = FEATURES.index("sequences")

Evidence = TypeVar("Evidence", Hits, Moments)
Parent = Literal["main", "sibling"]


def learn(kept: Kept, delta: Delta, *, now: float) -> Kept:
    """``kept`` with the estimates moved."""
    if delta.draft and delta.draft != kept.draft:
        kept = _of_new_draft(kept, delta.draft)
    return kept.model_copy(
        update={
            "acceptance": tuple(_acceptance(kept, delta, now)),
            "requests": tuple(_requests(kept.requests, delta)),
            "traffic": tuple(_traffic(kept.traffic, delta)),
            "prefill": _prefill(kept.prefill, delta),
            "costs": tuple(_costs(kept, delta, now)),
            "wander": _wander(kept, delta),
            "load": _load(kept.load, delta, now),
        }
    )


def _of_new_draft(kept: Kept, draft: str) -> Kept:
    """A new draft starts from nothing and at depth.initial; but plain steps cost what they did."""
    plain = tuple(cell for cell in kept.costs if cell.draft_passes == 0)
    return kept.model_copy(update={"draft": draft, "rows": (), "acceptance": (), "requests": (), "costs": plain})


def _acceptance(kept: Kept, delta: Delta, now: float) -> Iterable[DepthMemory]:
    effects = {task: design_effect(kept, task) for task, _ in (*delta.acceptance, *delta.siblings)}
    cells = {(cell.task, cell.depth, cell.parent): cell for cell in _doubted(kept.acceptance, delta, effects, now)}
    parents: tuple[Parent, Parent] = ("main", "sibling")
    for parent, found in zip(parents, (delta.acceptance, delta.siblings), strict=True):
        for (task, depth), fresh in found.items():
            if fresh.total > 0:
                key = (task, depth, parent)
                cells[key] = _depth(cells.get(key), key, fresh, effects[task], now)
    return (cells[key] for key in sorted(cells))


def _doubted(
    known: Iterable[DepthMemory], delta: Delta, effects: Mapping[str, float], now: float
) -> Iterable[DepthMemory]:
    """A change at one depth takes weight from what is known of the deeper ones of that task: they are seen seldom."""
    changed: dict[str, int] = {}
    for cell in known:
        fresh = delta.acceptance.get((cell.task, cell.depth), NO_HITS)
        if cell.parent != "main" or fresh.total <= 0:
            continue
        if rate_changed(*_apart(*_evidence(cell, fresh, effects[cell.task], now)), effects[cell.task]):
            changed[cell.task] = min(cell.depth, changed.get(cell.task, cell.depth))
    for cell in known:
        share = (
            min(1.0, DEEPER_WEIGHT / max(1e-9, cell.total)) if cell.depth > changed.get(cell.task, cell.depth) else 1
        )
        yield cell if share == 1 else _lighter(cell, share)


def _lighter(cell: DepthMemory, share: float) -> DepthMemory:
    values = {name: _short(share * getattr(cell, name)) for name in ("hits", "total", "new_hits", "new_total")}
    return cell.model_copy(update={**values, "ranks": _ranks(tuple(share * count for count in cell.ranks))})


def _evidence(known: DepthMemory | None, fresh: Hits, effect: float, now: float) -> tuple[Hits, Hits, Hits, float]:
    """What was known, what of it was new, what is new now, and the share of the old that is kept: longer where drafts
    of one request resemble each other, for an estimate must outlast a request or two."""
    before = Hits(known.hits, known.total, known.ranks) if known else NO_HITS
    gathered = Hits(known.new_hits, known.new_total) if known and _is_recent(known, now) else NO_HITS
    return before, gathered, fresh, _kept_share(fresh.total, now - known.at if known else 0, HALF_LIFE_DRAFTS * effect)


def _depth(
    known: DepthMemory | None, key: tuple[str, int, Parent], fresh: Hits, effect: float, now: float
) -> DepthMemory:
    after, new, changed = _joined(*_evidence(known, fresh, effect, now), partial(rate_changed, effect=effect))
    apart = new if new.total < SETTLED_DRAFTS * effect else NO_HITS
    return DepthMemory(
        task=key[0],
        depth=key[1],
        parent=key[2],
        hits=_short(after.hits),
        total=_short(after.total),
        ranks=_ranks(after.ranks),
        at=now,
        new_hits=_short(apart.hits),
        new_total=_short(apart.total),
        changed_at=now if changed else known.changed_at if known else 0,
    )


def _ranks(counts: tuple[float, ...]) -> tuple[float, ...]:
    """Rounded, without what stands for nothing at the end: most ranks of most cells."""
    rounded = [max(0.0, float(f"{count:.{RANK_DIGITS}g}")) for count in counts]
    while rounded and rounded[-1] < LEAST_RANK:
        rounded.pop()
    return tuple(rounded)


def _joined(
    before: Evidence, gathered: Evidence, fresh: Evidence, keep: float, changed: Callable[[Evidence, Evidence], bool]
) -> tuple[Evidence, Evidence, bool]:
    """All evidence, what of it is new, which gathers over polls until it contradicts the older, and whether it does:
    then the older gives way."""
    older, new = _apart(before, gathered, fresh, keep)
    contradicted = changed(older, new)
    if contradicted:
        older = older.times(min(1, CONTRADICTED_WEIGHT * new.weight / older.weight))
    return older.plus(new), new, contradicted


def _apart(before: Evidence, gathered: Evidence, fresh: Evidence, keep: float) -> tuple[Evidence, Evidence]:
    """What is older, and what is new."""
    return before.plus(gathered.times(-1)).times(keep), gathered.times(keep).plus(fresh)


def _is_recent(known: DepthMemory | CostMemory, now: float) -> bool:
    """Whether what was new when it was remembered is new still."""
    return now - known.at < GATHER_SECONDS


def _requests(known: Iterable[RequestMemory], delta: Delta) -> Iterable[RequestMemory]:
    cells = {cell.task: RequestSums(*cell.sums) for cell in known}
    for task, fresh in delta.requests.items():
        keep = 0.5 ** (fresh.n / HALF_LIFE_REQUESTS)
        cells[task] = cells.get(task, NO_REQUESTS).times(keep).plus(fresh)
    for task in sorted(cells):
        n, a, d, aa, ad, dd = map(_short, cells[task])
        yield RequestMemory(task=task, sums=(n, a, d, aa, ad, dd))


def _traffic(known: Iterable[TrafficMemory], delta: Delta) -> Iterable[TrafficMemory]:
    """All tasks forget alike, by what came in of any: a task that comes no more leaves the mix."""
    cells = {cell.task: TrafficSums(*cell.sums) for cell in known}
    count = sum(max(0.0, fresh.arrivals, fresh.finished) for fresh in delta.traffic.values())
    keep = _kept_share(count, delta.seconds, HALF_LIFE_ARRIVALS) if count else 1.0
    for task in {*cells, *delta.traffic}:
        fresh = delta.traffic.get(task, NO_TRAFFIC)
        cells[task] = TrafficSums(*(max(0.0, value) for value in cells.get(task, NO_TRAFFIC).times(keep).plus(fresh)))
    for task in sorted(cells):
        arrivals, finished, prompt, cached, output = map(_short, cells[task])
        yield TrafficMemory(task=task, sums=(arrivals, finished, prompt, cached, output))


def _prefill(known: tuple[float, ...], delta: Delta) -> tuple[float, ...]:
    """Steps with prefill, all kinds together: what a prompt's token costs more than decoding is one number."""
    found = [moments for key, moments in delta.steps.items() if key.prefill and moments.count > 0]
    if not found:
        return known
    fresh = reduce(Moments.plus, found)
    before = Moments(known) if known else fresh.times(0)
    keep = 0.5 ** (fresh.count / HALF_LIFE_PREFILL_STEPS)
    return _shorts(before.times(keep).plus(fresh).values)


def _costs(kept: Kept, delta: Delta, now: float) -> Iterable[CostMemory]:
    """Steps without prefill alone: plans are made for decoding."""
    cells = {CellKey.of(cell): cell for cell in kept.costs}
    changed = partial(cost_changed, wander=kept.wander)
    for key, fresh in delta.steps.items():
        if not key.prefill and fresh.count > 0 and fresh.seconds > LEAST_SECONDS * fresh.count:
            cells[key] = _cost(cells.get(key), key, fresh, now, changed)
    return (cells[key] for key in sorted(cells))


def _cost(
    known: CostMemory | None, key: CellKey, fresh: Moments, now: float, changed: Callable[[Moments, Moments], bool]
) -> CostMemory:
    nothing = fresh.times(0)
    before = Moments(known.values) if known else nothing
    gathered = Moments(known.new_values) if known and known.new_values and _is_recent(known, now) else nothing
    keep = _kept_share(fresh.count, now - known.at if known else 0, HALF_LIFE_STEPS)
    after, new, _ = _joined(before, gathered, fresh, keep, changed)
    apart = new.values if new.count < LEAST_STEPS else ()
    left = max(0.0, after.count - fresh.count) / before.count if before.count > 0 else 0.0
    polls, spells, spell_at = (known.polls, known.spells, known.spell_at) if known else (0.0, 0.0, 0.0)
    is_new_spell = now - spell_at >= SPELL_SECONDS
    return CostMemory(
        **key._asdict(),
        values=_shorts(after.values),
        at=now,
        new_values=_shorts(apart),
        polls=_short(1 + left * polls),
        spells=_short(max(1.0, is_new_spell + left * spells)),
        spell_at=now if is_new_spell else spell_at,
        made_up=_short(left * known.made_up) if known else 0,
    )


def _wander(kept: Kept, delta: Delta) -> float:
    """Moves by what this poll's means were off; a step of cost is no wandering and counts for little of its size."""
    known = {CellKey.of(cell): Moments(cell.values) for cell in kept.costs}
    found = [
        (_off(known[key], fresh), fresh.seconds)
        for key, fresh in delta.steps.items()
        if not key.prefill and key in known and known[key].count >= LEAST_STEPS and fresh.count >= LEAST_STEPS_OF_POLL
    ]
    seconds = sum(weight for _, weight in found)
    if not seconds:
        return kept.wander
    off = sum(square * weight for square, weight in found) / seconds
    return _short(kept.wander + WANDER_SHARE * (off - kept.wander))


def _off(before: Moments, fresh: Moments) -> float:
    """Squared relative error of the old mean, less its noise; the fresh steps may be few and happen to be alike."""
    gap = (before.mean_seconds - fresh.mean_seconds) ** 2
    noise = before.variance / before.count + max(before.variance, fresh.variance) / fresh.count
    return min(MOST_OFF**2, max(0.0, gap - noise) / before.mean_seconds**2)


def _load(known: LoadMemory, delta: Delta, now: float) -> LoadMemory:
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
    return LoadMemory(
        sequences=_short(sequences),
        context_bucket=max(by_context, key=lambda bucket: by_context[bucket]),
        task=max(tasks, key=lambda task: tasks[task]) if tasks else known.task,
        at=now,
    )


def _kept_share(count: float, seconds: float, half_life: float) -> float:
    return float(max(0.5 ** (count / half_life), 0.5 ** (max(0.0, seconds) / HALF_LIFE_SECONDS)))


def _short(value: float) -> float:
    """Six digits are more than was measured, and the memory must stay small."""
    return float(f"{value:.{DIGITS}g}")


def _shorts(values: tuple[float, ...]) -> tuple[float, ...]:
    """The same of many, written and read as one text: a look shortens a thousand."""
    return tuple(map(float, ((f"%.{DIGITS}g " * len(values)) % values).split()))
