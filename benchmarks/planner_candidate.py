"""Candidate for the planner's decision: one rule by expected value, instead of gain, trial, probe and patience.

A change is worth its gain, less the doubt that waiting resolves for free and the cost of a change that grows with each
change of the last hour. Where only running a shape can show what it takes, its value is that of a knowledge gradient
(Frazier, Powell and Dayanik, 2008): the expected gain of the better of both once the trial has shown it, less the
changes of the plan. What was not measured for a while gets uncertain, so a probe of stopped speculation follows from
the same formula.

It is not used by the operator. The variant "without all of them: the candidate" of ``planner_ablation.py rules``
compares it with the rules in use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from specdecode_operator.planning.look import Change, Look, with_drafts
from specdecode_operator.planning.options import Options
from specdecode_operator.planning.situation import Shapes
from specdecode_operator.state.learned import RowState

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class ValueTuning:
    """Constants of the rule. ``z`` are standard errors by which a gain must exceed what is asked."""

    trial_share: float = 0.01
    """Share of the horizon that a trial takes."""
    measured_error: float = 0.03
    """Relative error of a gain after a trial."""
    drift_per_hour: float = 0.15
    """Standard deviation of the change of a gain within an hour without measurements."""
    mean_weight: float = 0.5
    """Weight of the mean, against the bound, where shapes are ranked."""
    z: float = 1.64
    z_changed: float = 0.84
    z_stop: float = 1.28
    growth: float = 2.0
    """Factor of the least gain with each further change within an hour."""
    dwell_growth: float = 4.0
    back_cost: float = 1.0
    """Cost of the change back after a trial in vain, in least gains."""
    stop_margin: float = 0.02
    held_loss: float = 0.08
    """Relative loss from which a row stops that the guards hold back."""
    trial_seconds: float = 10.0
    longest_trial_seconds: float = 60.0
    busy_seconds: float = 30.0
    fresh_seconds: float = 60.0
    """Age up to which steps with drafts count as measured now."""


TUNING = ValueTuning()


def changes(look: Look) -> list[Change]:
    """Return the changes of the rows of one load, as ``planning.moves.changes`` does."""
    if not look.rows or not look.situation.times.visited(look.situation.load, look.situation.context):
        return []
    if any(row.trial for row in look.rows):
        return _ended(look)
    if look.held:
        return _held(look)
    return _stop(look) or _best(look)


def _groups(rows: list[RowState]) -> list[list[RowState]]:
    return [rows, *([row] for row in rows if len(rows) > 1)]


def _stop(look: Look) -> list[Change]:
    """Plain decoding needs no dwell where it is surely faster."""
    least = {task.name: task.bounds.least for task in look.situation.tasks}
    drafting = [row for row in look.rows if row.depth and not least[row.task]]
    for group in _groups(drafting) if drafting else []:
        options, around = look.options(group)
        plain = around.plain()
        asked = math.log(1 / look.situation.promise.min_speedup)
        if _bound(look, options, look.shapes, plain, TUNING.z_stop) > asked + TUNING.stop_margin:
            return [look.counted(one) for one in look.to(group, plain, options, cause="loses")]
    return []


def _held(look: Look) -> list[Change]:
    """The guards run plain decoding whatever the rows are, so a change to fewer passes costs nothing."""
    group = [row for row in look.rows if row.depth and look.has_moves_left(row) and look.is_there(row)]
    if not group:
        return []
    options, around = look.options(group)
    plain, now = options.by_shapes[around.plain()], options.by_shapes[look.shapes]
    smaller = [s for s, o in options.by_shapes.items() if o.passes < now.passes]
    smaller = [s for s in smaller if not with_drafts(s) or options.gain(plain.shapes, s) > look.least_gain]
    best = min(smaller, key=lambda s: options.by_shapes[s].rank, default=None)
    if best is None or (best == plain.shapes and options.gain(look.shapes, plain.shapes) < TUNING.held_loss):
        return []
    return [look.counted(one) for one in look.to(group, best, options, cause="loses")]


def _best(look: Look) -> list[Change]:
    """Return the change of the greatest value, if one is above zero."""
    group = [row for row in look.rows if _rested(look, row)]
    if not group:
        return []
    options, around = look.options(group)
    fast = look.fast_enough(options, around.plain())
    values = [(_value(look, options, s), s) for s in options.by_shapes if s != look.shapes and fast(s)]
    value, best = max(values, key=lambda one: one[0][0], default=((0.0, False), None))
    if best is None or value[0] <= 0:
        return []
    moved = [look.counted(one) for one in look.to(group, best, options, cause="trial" if value[1] else "gain")]
    if value[1]:
        return [replace(one, row=one.row.model_copy(update={"trial": True})) for one in moved]
    return moved


def _rested(look: Look, row: RowState) -> bool:
    changed = look._changed_at(row)
    count = sum(at > changed for at in look._moves(row))
    dwell = look.speculation.hysteresis.min_dwell_seconds * TUNING.dwell_growth ** max(0, count - 1)
    return look.has_moves_left(row) and look.now - row.since >= dwell


def _least(look: Look) -> float:
    """Least gain, which grows with the changes of the last hour."""
    counts = [sum(at > look._changed_at(row) for at in look._moves(row)) for row in look.rows]
    return math.log(1 + look.least_gain) * TUNING.growth ** max(0.0, max(counts, default=0) - 1)


def _value(look: Look, options: Options, shapes: Shapes) -> tuple[float, bool]:
    """Return the mean gain over the horizon net of the cost of the change, and whether the change is a trial."""
    outdated = all(look.is_outdated(row) for row in look.rows)
    z = TUNING.z_changed if outdated else TUNING.z
    least = _least(look) * options._moving(options.by_shapes[look.shapes], options.by_shapes[shapes])
    known = _bound(look, options, look.shapes, shapes, z) - (0.0 if outdated else least)
    if options.by_shapes[shapes].seconds.steps and known > 0 and options.by_shapes[shapes].passes <= _timed(options):
        mean = math.log(1 + options.gain(look.shapes, shapes))
        return (TUNING.mean_weight * mean + (1 - TUNING.mean_weight) * known, False)
    spread = _trial_spread(look, options, shapes)
    if not spread:
        return (known if options.by_shapes[shapes].passes <= _timed(options) else -1.0, False)
    mean = math.log(1 + options.gain(look.shapes, shapes))
    better = _expected_positive(mean, spread)
    back = _NORMAL.cdf(-mean / spread)
    value = mean * TUNING.trial_share + better - least * (1 + TUNING.back_cost * back)
    return (value, True)


def _timed(options: Options) -> int:
    return max((o.passes for o in options.by_shapes.values() if o.seconds.steps), default=0)


def _bound(look: Look, options: Options, before: Shapes, after: Shapes, z: float) -> float:
    one, two = options.by_shapes[before], options.by_shapes[after]
    variance = options._time_variance(one, two) + options._tokens_variance(one, two)
    return math.log(1 + options.gain(before, after)) - z * math.sqrt(variance)


def _trial_spread(look: Look, options: Options, shapes: Shapes) -> float:
    """Return the standard deviation of a gain that only a trial can show; 0 where it is measured anyway."""
    if not look.here or look.now - look.learned.load.at > TUNING.busy_seconds or not with_drafts(shapes):
        return 0.0
    option = options.by_shapes[shapes]
    bursts = look.speculation.explore_percent > 0
    chain = len({s for _, s in shapes}) == 1 and shapes[0][1].is_chain
    variance = 0.0
    if not option.seconds.steps:
        if bursts and chain and with_drafts(look.shapes):
            return 0.0
        variance = option.seconds.variance / option.seconds.mean**2
    elif not with_drafts(look.shapes):
        newest = max((cell.at for cell in look.learned.costs if cell.draft_passes), default=0.0)
        variance = TUNING.drift_per_hour**2 * max(0.0, look.now - newest - TUNING.fresh_seconds) / 3600
    return math.sqrt(max(0.0, variance - TUNING.measured_error**2))


def _expected_positive(mean: float, spread: float) -> float:
    """Return E[max(0, X)] of a normal X."""
    z = mean / spread
    return mean * _NORMAL.cdf(z) + spread * _NORMAL.pdf(z)


def _ended(look: Look) -> list[Change]:
    """Once a trial was timed, the better shapes stay."""
    rows = list(look.rows)
    since = max(row.since for row in rows if row.trial)
    options, _ = look.options(rows)
    timed = options.by_shapes[look.shapes].seconds
    if (
        not timed.steps or timed.at - since <= TUNING.trial_seconds
    ) and look.now - since < TUNING.longest_trial_seconds:
        return []
    known = [s for s, o in options.by_shapes.items() if o.seconds.steps]
    best = options.surest(look.shapes, 0.0, known, 0.5)
    over = [row.model_copy(update={"trial": False}) for row in rows]
    if best is None:
        return [_stays(row) for row in over]
    moved = {one.row.task: one for one in look.to(rows, best, options, cause="trial", why="after a trial; ")}
    return [moved.get(row.task) or _stays(row) for row in over]


def _stays(row: RowState) -> Change:
    return Change(row=row, before=row.shape, gain=None, cause="trial", reason="")
