"""What moves the rows of one load: a stop, a retreat, a gain, a trial, a probe, in this order. Pure; reads
planning.look."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from specdecode_operator.planning import trials
from specdecode_operator.planning.look import Change, Look, with_drafts
from specdecode_operator.planning.options import Options
from specdecode_operator.planning.situation import Shapes
from specdecode_operator.state.learned import RowState

CERTAINTY = 0.9
CERTAINTY_AFTER_CHANGE = 0.8
"""That anything is gained at all, where what the present shape was chosen by is true no more."""
LONGEST_PATIENCE_SECONDS = 3600.0
LEAST_LOSS = 0.02
"""Relative loss against plain decoding below which nothing is stopped: it would come back with the next easy answer."""
LEAST_LOSS_HELD_BACK = 0.08
"""The same of what the guards hold back, likelier than not: sure it cannot become, since hardly anything runs of it."""
LOSES = "speculation loses against plain decoding; "
HELD_BACK = "the guards run this load plainly; "
OUTDATED = "what it was chosen by has changed; "


def changes(look: Look) -> list[Change]:
    """The rows that move, and why. A probe that was not measured yet stands."""
    rows = [row for row in look.rows if not row.probing or trials.probed(look, row)]
    if not rows or not look.situation.times.visited(look.situation.load, look.situation.context):
        return []  # nobody has been at this load: what other loads cost is no reason to move
    if any(row.trial for row in rows):
        return _stopped(look, rows) or trials.ended(look, rows)
    retreat = _stopped(look, rows) or _retreated(look, rows)
    return retreat or _improved(look, rows) or trials.begun(look, rows) or trials.probes(look, rows)


# --- speculation that loses -----------------------------------------------------------------------------------------


def _stopped(look: Look, rows: list[RowState]) -> list[Change]:
    """Speculation that loses stops at once, where plain decoding is allowed: of all tasks, else of one."""
    least = {task.name: task.bounds.least for task in look.situation.tasks}
    drafting = [row for row in rows if row.depth and not least[row.task]]
    groups = [drafting, *([row] for row in drafting if len(drafting) > 1)]
    return next((found for group in groups if group and (found := _stop(look, group))), [])


def _stop(look: Look, group: list[RowState]) -> list[Change]:
    """A probe at first doubt; what the guards hold back at first doubt as well, where it is believed to lose a lot: it
    runs plainly already, and the guards let it try again."""
    options, around = look.options(group)
    plain = around.plain()
    asked = 1 / look.situation.promise.min_speedup - 1
    sure = options.confidence(look.shapes, plain, asked + LEAST_LOSS)
    loses = sure >= (trials.DOUBT if all(row.probing for row in group) else CERTAINTY)
    if look.held:
        loses = loses or options.confidence(look.shapes, plain, asked + LEAST_LOSS_HELD_BACK) >= trials.DOUBT
    if not loses:
        return []
    standard = options.by_shapes[plain].rank
    winners = [one for one, option in options.by_shapes.items() if with_drafts(one) and option.rank < standard]
    best = options.surest(look.shapes, 0.0, filter(look.fast_enough(options, plain), winners), CERTAINTY)
    found = look.to(group, best or plain, options, cause="loses", why=LOSES)
    return [look.counted(_patient(look, change)) for change in found]


def _patient(look: Look, change: Change) -> Change:
    """A row that stopped is off until patience is over; it doubles when speculation came back in vain."""
    row = change.row
    if row.depth:
        return change
    before = next(other for other in look.rows if other.task == row.task)
    patience = max(float(look.speculation.hysteresis.min_dwell_seconds), 1.0)
    if before.patience and look.now - before.since < 4 * before.patience:
        patience = min(LONGEST_PATIENCE_SECONDS, 2 * before.patience)
    waiting = row.model_copy(update={"patience": patience, "off_until": look.now + patience})
    return replace(change, row=waiting)


# --- speculation that is held back ----------------------------------------------------------------------------------


def _retreated(look: Look, rows: list[RowState]) -> list[Change]:
    """What the guards hold back does not run, whatever the row says, so the best shape with fewer passes takes its
    place without having waited for the dwell, where it is believed to be better than what is held back. Where the
    larger shape is believed to be the best and loses, the belief errs (the batch was of other tasks, say), and as much
    for the smaller one. Of a task that is not there, nothing is held back."""
    group = [row for row in rows if row.depth and look.has_moves_left(row) and look.is_there(row)]
    if not look.held or not group:
        return []
    options, around = look.options(group)
    plain, now = options.by_shapes[around.plain()], options.by_shapes[look.shapes]
    smaller = [one for one, option in options.by_shapes.items() if with_drafts(one) and option.passes < now.passes]
    better = [one for one in smaller if options.by_shapes[one].rank < min(plain.rank, now.rank)]
    best = min(
        filter(look.fast_enough(options, around.plain()), better),
        key=lambda one: options.by_shapes[one].rank,
        default=None,
    )
    if best is None:
        return []
    # What it gains is against what runs, and that is plain.
    gain = options.gain(plain.shapes, best)
    if gain < look.least_gain:
        return []
    found = look.to(group, best, options, cause="loses", why=HELD_BACK)
    return [look.counted(replace(change, gain=gain)) for change in found]


# --- a gain ---------------------------------------------------------------------------------------------------------


def _improved(look: Look, rows: list[RowState]) -> list[Change]:
    """To the best of what is surely better, or of what is likely to be where a change has outdated the rows."""
    group = [row for row in rows if look.may_move(row)]
    if not group:
        return []
    options, around = look.options(group)
    among = list(filter(look.fast_enough(options, around.plain()), options.within_timed()))
    best = options.surest(look.shapes, look.least_gain, among, CERTAINTY)
    if best is not None:
        return _moved(look, group, best, options)
    best = _answer(look, options, among) if all(map(look.is_outdated, group)) else None
    return [] if best is None else _moved(look, group, best, options, why=OUTDATED)


def _answer(look: Look, options: Options, among: Iterable[Shapes]) -> Shapes | None:
    """A shape that was chosen by what is true no more has no claim against another, so less evidence moves it: to be
    sure takes the drafts of many requests, and meanwhile the old shape costs what the new one would gain. Where several
    tasks run, only if all of their rows are outdated: an alarm of one is too often a batch of other requests."""
    worth = [one for one in among if options.gain(look.shapes, one) >= look.least_gain]
    return options.surest(look.shapes, 0.0, worth, CERTAINTY_AFTER_CHANGE)


def _moved(look: Look, group: list[RowState], best: Shapes, options: Options, why: str = "") -> list[Change]:
    """What comes back without having been timed here is on trial."""
    if with_drafts(look.shapes) or options.by_shapes[best].seconds.steps:
        return [look.counted(change) for change in look.to(group, best, options, cause="gain", why=why)]
    return trials.on_trial(look, group, best, options) if trials.may_begin(look) else []
