"""All rows of a plan: which there are, when their loads are decided again, and the published plan. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from specdecode_operator.api.pins import Pin
from specdecode_operator.api.v1alpha1 import SpeculationSpec
from specdecode_operator.planning.acceptance_model import AcceptanceModel
from specdecode_operator.planning.decision_rule import Change, LoadDecision
from specdecode_operator.planning.loads import present_row
from specdecode_operator.planning.row_states import is_timed_now, next_row, wakes_at
from specdecode_operator.planning.shape_search import ShapeSearch
from specdecode_operator.planning.step_time_model import StepTimeModel
from specdecode_operator.planning.task_bounds import bounds_of, has_own, names, plans
from specdecode_operator.planning.tuning import TUNING
from specdecode_operator.planning.workload import Objective, Prompt, idle, mix_requests, tasks_at
from specdecode_operator.state.learned import LearnedState, RowState
from specdecode_operator.state.session import Standing
from specdecode_worker.contract import (
    OTHER_TASK,
    Buckets,
    CaptureRules,
    DraftAssignment,
    Plan,
    PlanRow,
    PlanState,
    TaskMatch,
    TreeShape,
)

READ = {"draft", "rows", "acceptance", "requests", "traffic", "prefill", "costs", "wander", "load"}
"""Fields of the state that rows depend on."""


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
    prompt: Prompt | None = None,
) -> Chosen:
    """Decide the rows of the present load, and every ``window_seconds`` those of all loads.

    ``max_num_seqs`` and ``kv_tokens`` (None if unknown) are those of one worker. The guards of all workers suspend
    speculation at the loads ``held_back``.
    """
    rows = list(rows_of(speculation, learned, found))
    changes = [change for row in rows if (change := _within_bounds(row, speculation, now))]
    after = {_key(row): row for row in (*rows, *(change.row for change in changes))}
    bounded = {_load_of(change.row) for change in changes}
    times, model = StepTimeModel.fit(learned.costs, learned.wander), AcceptanceModel(learned, speculation)
    objective, swept_at = Objective(speculation.objective, prompt or Prompt()), _swept_at(learned, now)
    for at in {_load_of(row): None for row in rows}:
        group = [row for row in after.values() if _load_of(row) == at]
        is_present = at == present_row(learned.load, found)
        is_due = swept_at == now or is_present or any(is_timed_now(row) for row in group)
        if times is None or at in bounded or not is_due:
            continue
        quiet = idle(learned, [row.task for row in group])
        busy = [row for row in group if row.task not in quiet]
        load = times.typical(found, *at, max_num_seqs)
        tasks = tasks_at(model, busy, load, kv_tokens) if busy else ()
        search = ShapeSearch(times, load, tasks, objective, mix_requests(learned))
        moved = LoadDecision(speculation, learned, search, busy, now, at in held_back, is_present).changes()
        after.update((_key(change.row), change.row) for change in moved)
        after.update((_key(row), row) for row in _staying(busy, moved))
        if moved and not any(after[_key(row)].depth for row in busy):
            stopped = [change for row in group if row not in busy and (change := _also_stopped(row, speculation, now))]
            after.update((_key(change.row), change.row) for change in stopped)
            moved += stopped
        changes += moved
    settled = tuple(after.values())
    if changes:
        # Rows that never changed follow those that did with this plan, and not with the next one.
        settled = tuple(rows_of(speculation, learned.model_copy(update={"rows": settled}), found))
    return Chosen(rows=settled, changes=tuple(change for change in changes if change.is_move), swept_at=swept_at)


def rows_of(speculation: SpeculationSpec, learned: LearnedState, found: Buckets) -> Iterator[RowState]:
    """Yield one row per load and task.

    A task has rows once it was seen often enough, or at once if the spec says more of it than its name; until then it
    runs those of ``other``. A row that never changed follows depth.initial or, once that changed, the row of ``other``,
    unless a joint choice left it as it was. It is no deeper than the row of the nearest lower load that changed.
    """
    known = {_key(row): row for row in learned.rows}
    for task in names(speculation):
        seen = sum(cell.total for cell in learned.acceptance if (cell.task, cell.depth) == (task, 1))
        if not (task == OTHER_TASK or has_own(speculation, task) or seen >= TUNING.task_samples):
            continue
        bounds, moved = bounds_of(speculation, task), dict[int, TreeShape]()
        for concurrency in range(len(found.concurrency) + 1):
            for context in range(len(found.context) + 1):
                start = known.get((OTHER_TASK, concurrency, context))
                follows = start is not None and start.since > 0 and not has_own(speculation, task)
                shape = start.shape if start and follows else TreeShape.chain(bounds.initial)
                blank = RowState(concurrency=concurrency, context=context, task=task, depth=0).running(shape)
                row = known.get((task, concurrency, context), blank)
                if row.since or row.stays:
                    moved[context] = row.shape
                else:
                    row = row.running(bounds.nearest(min(shape, moved.get(context, shape), key=_size)))
                yield row


def basis_of(speculation: SpeculationSpec, learned: LearnedState, *others: object) -> bytes:
    """Return a digest of everything that a choice is made from, except for the time."""
    digest = hashlib.blake2b(learned.model_dump_json(include=READ).encode())
    digest.update(f"{speculation.model_dump_json()}{others!r}".encode())
    return digest.digest()


def standing(
    speculation: SpeculationSpec, learned: LearnedState, chosen: Chosen, basis: bytes, now: float
) -> Standing | None:
    """Return until when ``chosen`` is repeated, if it covered all loads, changed nothing, and there is no traffic."""
    is_busy = now - learned.load.at <= TUNING.window_seconds
    if is_busy or chosen.swept_at != now or chosen.changes or chosen.rows != learned.rows:
        return None
    ahead = (at for row in learned.rows for at in wakes_at(row, speculation.hysteresis) if at > now - 1)
    return Standing(basis=basis, since=now, until=min(ahead, default=math.inf) - 1)


def stands(known: Standing | None, basis: bytes, now: float) -> bool:
    """Return whether the last choice can be repeated."""
    return known is not None and known.basis == basis and known.since <= now < known.until


def still(learned: LearnedState, now: float) -> Chosen:
    """Return the present rows, as ``choose`` would."""
    return Chosen(rows=learned.rows, swept_at=_swept_at(learned, now))


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
) -> Plan:
    """Return ``before`` if nothing changed, else the next version, which is above those that workers run.

    Workers may run a higher version than the stored one if the state was lost; they would refuse a lower one.
    """
    common: dict[str, Any] = {
        "uid": uid,
        "draft": draft,
        "buckets": found,
        "tasks": tuple(TaskMatch(name=task.name, match=task.match, draft=task.draft) for task in speculation.tasks),
        "assignment": assignment,
        "capture": capture,
    }
    if speculation.method == "none" or speculation.mode == "Off":
        plan = Plan(**common, explore=0)
    else:
        planned = rows if plans(speculation) and draft != "" else ()
        plan = Plan(
            **common,
            rows=tuple(
                PlanRow(concurrency=r.concurrency, context=r.context, task=r.task, shape=r.shape) for r in planned
            ),
            initial=TreeShape.chain(speculation.depth.initial),
            max_depth=max(bounds_of(speculation, name).most for name in names(speculation)),
            top_k=speculation.tree.top_k,
            explore=min(0.5, speculation.explore_percent / 100),
        )
    plan = pin.over(plan) if pin else plan
    version = before.version if before and before.uid == uid else 0
    seen = max((state.version for state in running if state.uid == uid), default=0)
    if before is not None and plan.model_copy(update={"version": before.version}) == before and seen <= version:
        return before
    return plan.model_copy(update={"version": max(version, seen) + 1})


def _swept_at(learned: LearnedState, now: float) -> float:
    """Return the time when the rows of all loads are last decided: now, if the last time is long ago."""
    return learned.swept_at if 0 <= now - learned.swept_at < TUNING.window_seconds else now


def _load_of(row: RowState) -> tuple[int, int]:
    return row.concurrency, row.context


def _key(row: RowState) -> tuple[str, int, int]:
    return row.task, row.concurrency, row.context


def _size(shape: TreeShape) -> tuple[int, int]:
    return shape.depth, shape.nodes


def _staying(busy: Iterable[RowState], moved: Iterable[Change]) -> Iterator[RowState]:
    """Yield rows that inherit from ``other``, marked as explicit where the joint choice left them unchanged."""
    changed = {change.row.task for change in moved if change.is_move}
    if OTHER_TASK in changed:
        yield from (row.model_copy(update={"stays": True}) for row in busy if not row.since and row.task not in changed)


def _also_stopped(row: RowState, speculation: SpeculationSpec, now: float) -> Change | None:
    """Return the stop of a row without traffic, once all rows with traffic have stopped."""
    if not row.depth or bounds_of(speculation, row.task).least:
        return None
    off, reason = next_row(row, TreeShape.chain(0), now, counts=False), "all tasks that have traffic stopped"
    return Change(row=off, before=row.shape, gain=None, cause="loses", reason=reason)


def _within_bounds(row: RowState, speculation: SpeculationSpec, now: float) -> Change | None:
    bounds = bounds_of(speculation, row.task)
    shape = bounds.nearest(row.shape)
    if shape == row.shape:
        return None
    reason = f"the spec allows depth {bounds.least} to {bounds.most}, {bounds.max_nodes} nodes, {bounds.top_k} a token"
    return Change(row=row.running(shape, since=now), before=row.shape, gain=None, cause="bounds", reason=reason)
