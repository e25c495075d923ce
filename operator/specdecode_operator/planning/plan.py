"""The plan that goes out: rows by the mode, and a version that only rises."""

from __future__ import annotations

from collections.abc import Iterable

from specdecode_operator.api.pins import Pin
from specdecode_operator.api.v1alpha1 import SpeculationSpec
from specdecode_operator.planning.bounds import deepest, plans
from specdecode_operator.state.learned import RowState
from specdecode_worker.contract import Buckets, Plan, PlanRow, PlanState, TaskMatch, TreeShape


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
) -> Plan:
    """``before`` when nothing changed; else the next version. It also rises above whatever workers run.

    ``pin`` lies over what the mode says.

    Workers may run a higher version than the one remembered when the memory was lost; a plan that they would refuse
    as old would change nothing.
    """
    plan = _content(speculation, uid, draft, found, rows)
    plan = pin.over(plan) if pin else plan
    version = before.version if before and before.uid == uid else 0
    seen = max((state.version for state in running if state.uid == uid), default=0)
    if before is not None and plan.model_copy(update={"version": before.version}) == before and seen <= version:
        return before
    return plan.model_copy(update={"version": max(version, seen) + 1})


def _content(speculation: SpeculationSpec, uid: str, draft: str, found: Buckets, rows: Iterable[RowState]) -> Plan:
    tasks = tuple(TaskMatch(name=task.name, match=task.match, draft=task.draft) for task in speculation.tasks)
    if speculation.method == "none" or speculation.mode == "Off":
        return Plan(uid=uid, draft=draft, buckets=found, explore=0, tasks=tasks)
    following = plans(speculation) and draft != ""
    return Plan(
        uid=uid,
        draft=draft,
        buckets=found,
        rows=tuple(_row(row) for row in rows) if following else (),
        initial=TreeShape.chain(speculation.depth.initial),
        max_depth=deepest(speculation),
        top_k=speculation.tree.top_k,
        explore=min(0.5, speculation.explore_percent / 100),
        tasks=tasks,
    )


def _row(row: RowState) -> PlanRow:
    return PlanRow(concurrency=row.concurrency, context=row.context, task=row.task, shape=row.shape)
