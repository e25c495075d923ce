"""Moves the estimates of step times by what one poll brought: moments of every kind of step, and how much the means
of polls wander where neighbours come and go. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial, reduce

from specdecode_operator.planning.change import LEAST_STEPS, cost_changed
from specdecode_operator.planning.forgetting import is_recent, joined, kept_share, short, shorts
from specdecode_operator.planning.steptime import LEAST_SECONDS
from specdecode_operator.state.learned import LearnedState, StepTimeCell
from specdecode_operator.telemetry.counters import CellKey, Moments
from specdecode_operator.telemetry.deltas import Delta

HALF_LIFE_STEPS = 128.0
WANDER_OF_HALF_LIFE, MOST_STRETCH = 0.01, 16.0
"""Wander up to which the half-life of a step time is as above: a mean of its polls errs by four percent. With more of
it one remembers as much longer, at most so many times: else noise is all that the plan would follow."""
SPELL_SECONDS = 60.0
"""Steps that were timed so far apart met another weather of the machine."""
LEAST_STEPS_OF_POLL = 3
"""Slow steps come few to a poll; how far their mean wandered must be seen all the same."""
WANDER_SHARE = 0.1
"""Weight of one poll in the wander."""
MOST_OFF, MOST_SPELL = 0.2, 0.5
"""Relative error of a poll's mean beyond which it counts as no more: of one that comes alone, which a step of cost
is, and of those that come again and again, as a neighbour does who makes steps half as slow again."""
OFF_OVER_WANDER = 4.0
"""How far the squared error of a poll may be beyond the usual one to count as more of the same."""
HALF_LIFE_PREFILL_STEPS = 100.0


def learn_costs(learned: LearnedState, delta: Delta, now: float) -> Iterable[StepTimeCell]:
    """Steps without prefill alone: plans are made for decoding."""
    cells = {CellKey.of(cell): cell for cell in learned.costs}
    for key, fresh in delta.steps.items():
        if not key.prefill and fresh.count > 0 and fresh.seconds > LEAST_SECONDS * fresh.count:
            cells[key] = _cost(cells.get(key), key, fresh, now, learned.wander)
    return (cells[key] for key in sorted(cells))


def _cost(known: StepTimeCell | None, key: CellKey, fresh: Moments, now: float, wander: float) -> StepTimeCell:
    nothing = fresh.times(0)
    before = Moments(known.values) if known else nothing
    gathered = Moments(known.new_values) if known and known.new_values and is_recent(known.at, now) else nothing
    keep = _kept_of_steps(fresh.count, now - known.at if known else 0, wander)
    after, new, changed = joined(before, gathered, fresh, keep, partial(cost_changed, wander=wander))
    apart = new.values if new.count < LEAST_STEPS else ()
    left = max(0.0, after.count - fresh.count) / before.count if before.count > 0 else 0.0
    polls, spells, spell_at = (known.polls, known.spells, known.spell_at) if known else (0.0, 0.0, 0.0)
    is_new_spell = now - spell_at >= SPELL_SECONDS
    return StepTimeCell(
        **key._asdict(),
        values=shorts(after.values),
        at=now,
        new_values=shorts(apart),
        polls=short(1 + left * polls),
        spells=short(max(1.0, is_new_spell + left * spells)),
        spell_at=now if is_new_spell else spell_at,
        changed_at=now if changed else known.changed_at if known else 0,
        made_up=short(left * known.made_up) if known else 0,
    )


def _kept_of_steps(count: float, seconds: float, wander: float) -> float:
    longer = min(MOST_STRETCH, max(1.0, wander / WANDER_OF_HALF_LIFE))
    return float(kept_share(count, seconds, HALF_LIFE_STEPS) ** (1 / longer))


def learn_wander(learned: LearnedState, delta: Delta) -> float:
    """Moves by what this poll's means were off; a step of cost is no wandering and counts for little of its size, but
    what comes again counts for more each time. With less, spells were taken for changes, and the plan followed all."""
    most = min(MOST_SPELL**2, max(MOST_OFF**2, OFF_OVER_WANDER * learned.wander))
    known = {CellKey.of(cell): Moments(cell.values) for cell in learned.costs}
    found = [
        (min(most, _off(known[key], fresh)), fresh.seconds)
        for key, fresh in delta.steps.items()
        if not key.prefill and key in known and known[key].count >= LEAST_STEPS and fresh.count >= LEAST_STEPS_OF_POLL
    ]
    seconds = sum(weight for _, weight in found)
    if not seconds:
        return learned.wander
    off = sum(square * weight for square, weight in found) / seconds
    return short(learned.wander + WANDER_SHARE * (off - learned.wander))


def _off(before: Moments, fresh: Moments) -> float:
    """Squared relative error of the old mean, less its noise; the fresh steps may be few and happen to be alike."""
    gap = (before.mean_seconds - fresh.mean_seconds) ** 2
    noise = before.variance / before.count + max(before.variance, fresh.variance) / fresh.count
    return max(0.0, gap - noise) / before.mean_seconds**2


def learn_prefill(known: tuple[float, ...], delta: Delta) -> tuple[float, ...]:
    """Steps with prefill, all kinds together: what a prompt's token costs more than decoding is one number."""
    found = [moments for key, moments in delta.steps.items() if key.prefill and moments.count > 0]
    if not found:
        return known
    fresh = reduce(Moments.plus, found)
    before = Moments(known) if known else fresh.times(0)
    keep = 0.5 ** (fresh.count / HALF_LIFE_PREFILL_STEPS)
    return shorts(before.times(keep).plus(fresh).values)
