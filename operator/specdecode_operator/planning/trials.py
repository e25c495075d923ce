"""Shapes that run to be measured: trials of what was never timed at a load, and probes of what was stopped. Pure.

Both cost changes of the plan, and most are in vain; so their patience grows each time that they are.
"""

from __future__ import annotations

from dataclasses import replace

from specdecode_operator.planning.look import Change, Look
from specdecode_operator.planning.options import Options
from specdecode_operator.planning.situation import Shapes
from specdecode_operator.state.learned import RowState
from specdecode_worker.contract import OTHER_TASK

FRESH_SECONDS = 120.0
"""Cells of speculative steps that are younger need no probe."""
BUSY_SECONDS = 30.0
"""A deployment without traffic for longer learns nothing from a probe."""
PROBE_SECONDS = 10.0
"""Until a probe has reached the workers and a whole poll of its steps was read."""
LONGEST_TRIAL_SECONDS = 60.0
"""A load that went away leaves a trial without a verdict."""
DOUBT = 0.5
"""Enough for what may be taken back: more likely than not."""
TRIAL_GAIN = 0.03
"""Least gain of all tasks together that chains must promise to be tried: a trial costs two changes of the plan.
Trees, whose times follow those of no chain, need the least gain of the spec alone. It doubles with the patience: who
promised and did not keep it has to promise more."""
PATIENCE_SECONDS, LONGEST_PATIENCE_SECONDS = 900.0, 4 * 3600.0
"""After a trial: the least, and where doubling ends while they are in vain."""


def may_begin(look: Look) -> bool:
    """At the present load, with traffic, once the patience that the last trial here left is over. It is each load's
    own: with one for all of them the other loads kept what a trial would have mended."""
    return (
        look.here
        and look.now - look.learned.load.at <= BUSY_SECONDS
        and all(look.now >= row.no_trial_until for row in look.rows)
    )


def begun(look: Look, rows: list[RowState]) -> list[Change]:
    """Workers that explore time chains of other depths by themselves, in bursts. What else promises a gain, and was
    never timed at this load, can be known only by running it: trees, and other depths for other tasks."""
    group = [row for row in rows if look.may_move(row)]
    if not group or not may_begin(look):
        return []
    options, around = look.options(group)
    bursts = look.speculation.explore_percent > 0
    untimed = [one for one, found in options.by_shapes.items() if not found.seconds.steps]
    unknown = [one for one in untimed if not (bursts and _alike(one))]
    among = filter(look.fast_enough(options, around.plain()), unknown)
    least = TRIAL_GAIN * max(1.0, *(row.trial_patience / PATIENCE_SECONDS for row in rows))
    promising = [one for one in among if _has_tree(one) or options.gain(look.shapes, one) >= least]
    best = options.surest(look.shapes, look.least_gain, promising, DOUBT)
    return [] if best is None else on_trial(look, group, best, options)


def on_trial(look: Look, group: list[RowState], best: Shapes, options: Options) -> list[Change]:
    """The change to ``best``, to be taken back at first doubt."""
    found = look.to(group, best, options, cause="trial", why="a trial of what was never timed; ")
    return [replace(look.counted(one), row=_trying(look, look.counted(one).row)) for one in found]


def _trying(look: Look, row: RowState) -> RowState:
    patience = max(PATIENCE_SECONDS, row.trial_patience)
    longer = min(LONGEST_PATIENCE_SECONDS, 2 * patience)
    return row.model_copy(update={"trial": True, "no_trial_until": look.now + patience, "trial_patience": longer})


def ended(look: Look, rows: list[RowState]) -> list[Change]:
    """Once the shapes on trial were timed, what was timed and is better takes their place at once; else they stay,
    and the next trial needs no more patience than the first."""
    since = max(row.since for row in rows if row.trial)
    options, _ = look.options(rows)
    timed = options.by_shapes[look.shapes].seconds
    if (not timed.steps or timed.at - since <= PROBE_SECONDS) and look.now - since < LONGEST_TRIAL_SECONDS:
        return []
    known = [one for one, found in options.by_shapes.items() if found.seconds.steps]
    best = options.surest(look.shapes, 0.0, known, DOUBT)
    over = [row.model_copy(update={"trial": False}) for row in rows]
    if best is None:
        return [_stays(row.model_copy(update={"trial_patience": 0.0})) for row in over]
    moved = {one.row.task: one for one in look.to(rows, best, options, cause="trial", why="after a trial; ")}
    return [moved.get(row.task) or _stays(row) for row in over]


def _stays(row: RowState) -> Change:
    """What is remembered of a row changes, and not what it runs."""
    return Change(row=row, before=row.shape, gain=None, cause="trial", reason="")


def probes(look: Look, rows: list[RowState]) -> list[Change]:
    """Speculation that was stopped and about which nothing new is known is tried again once patience is over."""
    group = [row for row in rows if not row.depth and row.patience and look.now >= row.off_until]
    idle = look.now - look.learned.load.at > BUSY_SECONDS
    fresh = any(cell.draft_passes and look.now - cell.at < FRESH_SECONDS for cell in look.learned.costs)
    if not look.here or not group or idle or fresh:
        return []
    row = next((row for row in group if row.task == OTHER_TASK), group[0])
    options, _ = look.options([row])
    deeper = [one for one, option in options.by_shapes.items() if option.shape(row.task).nodes]
    if not deeper:
        return []
    best = min(deeper, key=lambda one: options.by_shapes[one].rank)
    why = f"a probe after {look.now - row.since:.0f} s of plain decoding; "
    found = look.to([row], best, options, cause="probe", why=why)
    return [replace(one, row=one.row.model_copy(update={"probing": True})) for one in found]


def probed(look: Look, row: RowState) -> bool:
    """Whether the shapes that a probe runs were timed since it began. Beside other tasks the steps are as deep as
    the deepest of them."""
    alone = len(look.rows) == 1
    return any(
        (cell.draft_passes == row.depth if alone else cell.draft_passes >= row.depth)
        and cell.at - row.since > PROBE_SECONDS
        for cell in look.learned.costs
    )


def _alike(shapes: Shapes) -> bool:
    """One chain for all tasks."""
    return len({shape for _, shape in shapes}) == 1 and shapes[0][1].is_chain


def _has_tree(shapes: Shapes) -> bool:
    return any(shape.nodes and not shape.is_chain for _, shape in shapes)
