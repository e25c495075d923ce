"""The shape of every row of the plan, with hysteresis.

The rows of one load are chosen together. They move to the shapes with the least measured time per token when the gain
exceeds the least gain with 90 % certainty (less will do after a change), each row having stood for its dwell and having
changes left in the hour.
Speculation that loses against plain decoding stops without waiting; it comes back when measurements say so and its
patience is over, and patience doubles each time it was in vain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from specdecode_operator.api.v1alpha1 import SpeculationSpec
from specdecode_operator.planning.acceptance import drafts_seen
from specdecode_operator.planning.bounds import bounds_of, has_own, names
from specdecode_operator.planning.loads import present_row, typical
from specdecode_operator.planning.look import Change, Look
from specdecode_operator.planning.mix import idle, situations
from specdecode_operator.planning.moves import changes as moves
from specdecode_operator.planning.promise import Prompt
from specdecode_operator.planning.steptime import StepTimes
from specdecode_operator.state.learned import LearnedState, RowState
from specdecode_worker.contract import OTHER_TASK, Buckets, TreeShape

LEAST_DRAFTS = 100
"""What a task must have shown before it gets rows of its own."""
SWEEP_SECONDS = 30.0
"""Between looks at loads that are not the present one: what is known of them moves slowly, and every look is another
chance to be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    rows: tuple[RowState, ...]
    changes: tuple[Change, ...] = ()
    swept_at: float = 0
    """When all loads were looked at last."""


def choose(
    speculation: SpeculationSpec,
    learned: LearnedState,
    found: Buckets,
    *,
    max_num_seqs: int,
    now: float,
    held_back: Collection[tuple[int, int]] = (),
    kv_tokens: float | None = None,
    prompt: Prompt | None = None,
) -> Chosen:
    """Every row as it should be from now on. ``held_back`` are loads where the guards of all workers run plainly,
    ``kv_tokens`` is what one worker's cache holds, ``prompt`` what reading a mean prompt takes."""
    rows = list(rows_of(speculation, learned, found))
    after = {_key(row): row for row in rows}
    changes = [change for row in rows if (change := _bounded(row, speculation, now))]
    bounded = {(change.row.concurrency, change.row.context) for change in changes}
    after.update({_key(change.row): change.row for change in changes})
    times = StepTimes.fit(learned.costs, learned.wander)
    at = situations(speculation, learned, times, kv_tokens=kv_tokens, prompt=prompt or Prompt())
    present, sweep = present_row(learned.load, found), not 0 <= now - learned.swept_at < SWEEP_SECONDS
    for load, group in _by_load(after.values()).items():
        here = present == load
        if load not in bounded and (sweep or here or any(row.trial or row.probing for row in group)):
            quiet = idle(learned, [row.task for row in group])
            busy = tuple(row for row in group if row.task not in quiet)
            situation = at(typical(learned.costs, found, *load, max_num_seqs), load[1], busy)
            moved = (
                moves(Look(speculation, learned, situation, busy, now, load in held_back, here)) if situation else []
            )
            after.update({_key(change.row): change.row for change in moved})
            after.update({_key(row): row for row in _staying(busy, moved)})
            if moved and not any(after[_key(row)].depth for row in busy):
                stopped = list(_following([row for row in group if row not in busy], speculation, now))
                after.update({_key(change.row): change.row for change in stopped})
                moved += stopped
            changes += moved
    settled = tuple(after[_key(row)] for row in rows)
    if changes:
        # Rows that never moved follow those that did with this plan, and not with one more after it.
        settled = tuple(rows_of(speculation, learned.model_copy(update={"rows": settled}), found))
    told = tuple(change for change in changes if change.is_move)
    return Chosen(rows=settled, changes=told, swept_at=now if sweep else learned.swept_at)


def _by_load(rows: Iterable[RowState]) -> dict[tuple[int, int], list[RowState]]:
    """By bucket of concurrency and of context."""
    found: dict[tuple[int, int], list[RowState]] = {}
    for row in rows:
        found.setdefault((row.concurrency, row.context), []).append(row)
    return found


def _key(row: RowState) -> tuple[str, int, int]:
    return row.task, row.concurrency, row.context


def rows_of(speculation: SpeculationSpec, learned: LearnedState, found: Buckets) -> Iterator[RowState]:
    """One per load and task. A task has rows once it was seen often enough, or at once when the spec says how it is
    to be drafted; until then it runs those of ``other``. A row that never moved follows depth.initial or, once that
    moved, the row of ``other``, unless it was chosen to stay beside it; and it is no deeper than the nearest lower
    load's row that did, within its own bounds: a busier batch pays more for every node, and who waits for it to be
    measured there keeps an overloaded worker overloaded."""
    known = {_key(row): row for row in learned.rows}
    for task in _with_rows(speculation, learned):
        bounds = bounds_of(speculation, task)
        moved: dict[int, TreeShape] = {}
        for concurrency in range(len(found.concurrency) + 1):
            for context in range(len(found.context) + 1):
                start = known.get((OTHER_TASK, concurrency, context))
                follows = start is not None and start.since > 0 and not has_own(speculation, task)
                shape = start.shape if start and follows else TreeShape.chain(bounds.initial)
                blank = RowState(concurrency=concurrency, context=context, task=task, depth=0).running(shape)
                row = known.get((task, concurrency, context), blank)
                if row.since or row.stays:
                    moved[context] = row.shape
                    yield row
                else:
                    yield row.running(bounds.nearest(min(shape, moved.get(context, shape), key=_size)))


def _staying(busy: Iterable[RowState], moved: list[Change]) -> Iterator[RowState]:
    """Rows that never moved follow ``other``, but not away from a choice that was made for them beside it."""
    if any(change.row.task == OTHER_TASK and change.is_move for change in moved):
        left = {change.row.task for change in moved}
        yield from (row.model_copy(update={"stays": True}) for row in busy if not row.since and row.task not in left)


def _following(idle_rows: list[RowState], speculation: SpeculationSpec, now: float) -> Iterator[Change]:
    """Rows of tasks without traffic stand still, but for a stop of all others."""
    for row in idle_rows:
        if row.depth and bounds_of(speculation, row.task).least == 0:
            stopped = row.running(TreeShape.chain(0), since=now, probing=False, trial=False)
            yield Change(
                row=stopped, before=row.shape, gain=None, cause="loses", reason="all tasks that have traffic stopped"
            )


def _size(shape: TreeShape) -> tuple[int, int]:
    return shape.depth, shape.nodes


def _with_rows(speculation: SpeculationSpec, learned: LearnedState) -> Iterable[str]:
    return [
        name
        for name in names(speculation)
        if name == OTHER_TASK or has_own(speculation, name) or drafts_seen(learned, name) >= LEAST_DRAFTS
    ]


def _bounded(row: RowState, speculation: SpeculationSpec, now: float) -> Change | None:
    """The bounds of the spec hold at once."""
    bounds = bounds_of(speculation, row.task)
    shape = bounds.nearest(row.shape)
    if shape == row.shape:
        return None
    reason = f"the spec allows depth {bounds.least} to {bounds.most}, {bounds.max_nodes} nodes, {bounds.top_k} a token"
    return Change(row=row.running(shape, since=now), before=row.shape, gain=None, cause="bounds", reason=reason)
