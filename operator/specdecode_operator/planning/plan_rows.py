"""All rows of a plan: which there are, when their loads are decided again, and the published plan. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter

from specdecode_operator.api.speculation import Pin
from specdecode_operator.api.v1alpha1 import SpeculationSpec
from specdecode_operator.planning.acceptance_model import AcceptanceModel
from specdecode_operator.planning.decision_rule import Change, LoadDecision, next_row
from specdecode_operator.planning.loads import present_row
from specdecode_operator.planning.shape_search import ShapeSearch
from specdecode_operator.planning.step_time_model import StepTimeModel
from specdecode_operator.planning.task_bounds import bounds_of, has_own, names, plans
from specdecode_operator.planning.tuning import TUNING
from specdecode_operator.planning.workload import Objective, idle, tasks_at
from specdecode_operator.state.learned import LearnedState, RowState
from specdecode_worker.contract import (
    OTHER_TASK,
    Buckets,
    CaptureRules,
    DraftAssignment,
    Plan,
    PlanRow,
    PlanState,
    TreeShape,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Rows as they should be from now on."""

    rows: tuple[RowState, ...]
    changes: tuple[Change, ...] = ()
    swept_at: float = 0
    """Time when the rows of all loads were last decided."""


def choose(
    speculation: SpeculationSpec,
    learned: LearnedState,
    found: Buckets,
    *,
    max_num_seqs: int,
    now: float,
    held_back: Collection[tuple[int, int]] = (),
    kv_tokens: float | None = None,
    objective: Objective | None = None,
) -> Chosen:
    """Decide the rows of the loads that are due.

    ``max_num_seqs`` and ``kv_tokens`` (None if unknown) are those of one worker. The guards of all workers suspend
    speculation at the loads ``held_back``.
    """
    rows = list(rows_of(speculation, learned, found))
    changes = [change for row in rows if (change := _within_bounds(row, speculation, now))]
    after, bounded = {_key(row): row for row in rows}, {change.row.load for change in changes}
    after.update((_key(change.row), change.row) for change in changes)
    due, swept_at = _due(rows, learned, found, now)
    times = StepTimeModel.fit(learned.costs, learned.wander) if due else None
    model, objective = AcceptanceModel(learned, speculation), objective or Objective(speculation.objective)
    for at in due:
        if times is None or at in bounded:
            continue
        group = [row for row in after.values() if row.load == at]
        quiet = idle(learned, [row.task for row in group])
        busy = [row for row in group if row.task not in quiet]
        load = times.typical(found, *at, max_num_seqs)
        search = ShapeSearch(times, load, tasks_at(model, busy, load, kv_tokens), objective)
        is_present = at == present_row(learned.load, found)
        moved = LoadDecision(speculation, learned, search, busy, now, at in held_back, is_present).changes()
        shapes = {row.task: row.shape for row in (*busy, *(change.row for change in moved))}
        if moved and not any(shape.nodes for shape in shapes.values()):
            moved += [change for row in group if row not in busy and (change := _also_stopped(row, speculation, now))]
        if any(change.is_move for change in moved):
            # A joint choice is one for every row with traffic: those that it left as they were follow no other row.
            after.update((_key(row), row.model_copy(update={"since": row.since or now})) for row in busy)
        after.update((_key(change.row), change.row) for change in moved)
        changes += moved
    settled = tuple(after.values())
    if changes:
        # Rows that never changed follow those that did with this plan, and not with the next one.
        settled = tuple(rows_of(speculation, learned.model_copy(update={"rows": settled}), found))
        changes += [change for row in settled for change in _followed(row, after[_key(row)].shape, changes)]
    return Chosen(rows=settled, changes=tuple(change for change in changes if change.is_move), swept_at=swept_at)


def rows_of(speculation: SpeculationSpec, learned: LearnedState, found: Buckets) -> Iterator[RowState]:
    """Yield one row per load and task.

    A task has rows once it was seen often enough, or at once if the spec says more of it than its name; until then it
    runs those of ``other``. A row that never changed follows depth.initial or, once that changed, the row of ``other``.
    It is no deeper than the row of the nearest lower load that changed.
    """
    known = {_key(row): row for row in learned.rows}
    for task in names(speculation):
        seen = sum(cell.total for cell in learned.acceptance if (cell.task, cell.depth) == (task, 1))
        is_own, bounds, changed = has_own(speculation, task), bounds_of(speculation, task), dict[int, TreeShape]()
        if not (task == OTHER_TASK or is_own or seen >= TUNING.task_samples):
            continue
        for concurrency, context in product(range(len(found.concurrency) + 1), range(len(found.context) + 1)):
            row = known.get((task, concurrency, context))
            row = row or RowState(concurrency=concurrency, context=context, task=task, depth=0)
            start = known.get((OTHER_TASK, concurrency, context))
            if row.since:
                changed[context] = row.shape
            else:
                shape = start.shape if start and start.since and not is_own else TreeShape.chain(bounds.initial)
                least = min(shape, changed.get(context, shape), key=attrgetter("depth", "nodes"))
                row = row.running(bounds.nearest(least))
            yield row


def next_plan(
    speculation: SpeculationSpec,
    *,
    uid: str,
    draft: str,
    found: Buckets,
    rows: Iterable[RowState],
    before: Plan | None,
    running: Iterable[PlanState],
    pin: Pin | None = None,
    assignment: DraftAssignment | None = None,
    capture: CaptureRules | None = None,
    prefill: tuple[str, ...] = (),
) -> Plan:
    """Return ``before`` if nothing changed, else the next version, which is above those that workers run.

    Workers may run a higher version than the stored one if the state was lost; they would refuse a lower one.
    """
    is_off = speculation.method == "none" or speculation.mode == "Off"
    planned = rows if plans(speculation) and draft != "" else ()
    plan = Plan(
        uid=uid,
        draft=draft,
        buckets=found,
        rows=tuple(PlanRow(concurrency=r.concurrency, context=r.context, task=r.task, shape=r.shape) for r in planned),
        initial=TreeShape.chain(0 if is_off else speculation.depth.initial),
        max_depth=max(bounds_of(speculation, name).most for name in names(speculation)),
        top_k=1 if is_off else speculation.tree.top_k,
        explore=0 if is_off else min(0.5, speculation.limits.explore_percent / 100),
        tasks=tuple(task.for_worker() for task in speculation.tasks),
        assignment=assignment,
        capture=capture,
        prefill=prefill,
    )
    plan = pin.over(plan) if pin else plan
    version = before.version if before and before.uid == uid else 0
    seen = max((state.version for state in running if state.uid == uid), default=0)
    if before is not None and plan.model_copy(update={"version": before.version}) == before and seen <= version:
        return before
    return plan.model_copy(update={"version": max(version, seen) + 1})


def _due(
    rows: Collection[RowState], learned: LearnedState, found: Buckets, now: float
) -> tuple[list[tuple[int, int]], float]:
    """Return the loads to decide, and the time when all were last decided.

    All loads every ``window_seconds``; the present one, and trials, at any time. Without traffic since, only trials.
    """
    loads, swept_at = dict.fromkeys(row.load for row in rows), learned.swept_at
    is_idle = 0 < learned.load.at <= swept_at - TUNING.window_seconds and swept_at <= now
    if not is_idle and not 0 <= now - swept_at < TUNING.window_seconds:
        return list(loads), now
    present = set[tuple[int, int]]() if is_idle else {present_row(learned.load, found)}
    at_any_time = present | {row.load for row in rows if row.trial}
    return [at for at in loads if at in at_any_time], swept_at


def _key(row: RowState) -> tuple[str, int, int]:
    return row.task, *row.load


def _also_stopped(row: RowState, speculation: SpeculationSpec, now: float) -> Change | None:
    """Return the stop of a row without traffic, once all rows with traffic have stopped."""
    if not row.depth or bounds_of(speculation, row.task).least:
        return None
    off = next_row(row, TreeShape.chain(0), now, counts=False)
    return Change(row=off, before=row.shape, gain=None, cause="loses", reason="all tasks that have traffic stopped")


def _followed(row: RowState, before: TreeShape, changes: Collection[Change]) -> list[Change]:
    """Return the change that a row follows, as a change of that row; nothing if it follows none."""
    alike = [change for change in changes if (change.row.context, change.row.shape) == (row.context, row.shape)]
    return [replace(change, row=row, before=before, follows=True) for change in alike[:1] if row.shape != before]


def _within_bounds(row: RowState, speculation: SpeculationSpec, now: float) -> Change | None:
    bounds = bounds_of(speculation, row.task)
    shape = bounds.nearest(row.shape)
    if shape == row.shape:
        return None
    reason = f"the spec allows depth {bounds.least} to {bounds.most}, {bounds.max_nodes} nodes, {bounds.top_k} a token"
    return Change(row=row.running(shape, since=now), before=row.shape, gain=None, cause="bounds", reason=reason)
