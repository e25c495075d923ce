"""The plan that goes out: what was chosen under what people say, why it moved, and what of it runs. Pure; of decide."""

from __future__ import annotations

from collections.abc import Iterable

from specdecode_operator import planning
from specdecode_operator.api.pins import Pin
from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.decision import history
from specdecode_operator.decision import overrides as steering
from specdecode_operator.decision.size_stage import kv_tokens
from specdecode_operator.planning import Change, Chosen
from specdecode_operator.planning.loads import bucket_text
from specdecode_operator.state.learned import LearnedState
from specdecode_operator.state.session import Standing
from specdecode_operator.types import Deployment, Observation
from specdecode_worker.contract import Buckets, Plan, TreeShape


def chosen_of(
    deployment: Deployment, observed: Observation, learned: LearnedState, found: Buckets, now: float
) -> tuple[Chosen, Standing | None]:
    """The rows as they should be, and for how long that stands; what still does is not chosen again."""
    speculation = deployment.spec.speculation
    if not planning.plans(speculation):
        return Chosen(rows=learned.rows, swept_at=learned.swept_at), None
    most, cache = deployment.spec.workers.max_num_seqs, kv_tokens(observed)
    held_back = _held_back(observed, learned.plan)
    basis = planning.basis_of(speculation, learned, found, most, cache, sorted(held_back))
    known = observed.session.standing
    if planning.stands(known, basis, now):
        return planning.still(learned, now), known
    chosen = planning.choose(
        speculation,
        learned,
        found,
        max_num_seqs=most,
        now=now,
        held_back=held_back,
        kv_tokens=cache,
        prompt=planning.prompt_of(learned),
    )
    return chosen, planning.standing(speculation, learned, chosen, basis, now)


def plan_of(
    deployment: Deployment,
    observed: Observation,
    learned: LearnedState,
    chosen: Chosen,
    pin: Pin | None,
    found: Buckets,
    now: float,
) -> tuple[LearnedState, Plan, tuple[DecisionRecord, ...], str | None]:
    """The kept rows and plan, and what changed. Advisory and a pause choose, tell, and change nothing."""
    speculation = deployment.spec.speculation
    follows = planning.follows(speculation) and not deployment.paused
    rows = steering.unpinned(chosen.rows, learned.rows, pin) if follows else learned.rows
    advised = speculation.mode == "Advisory" or (speculation.mode == "Auto" and pin is not None)
    recommended = _recommended(chosen, learned, found) if advised else None
    if deployment.paused and learned.plan is not None:
        return learned, learned.plan, (), recommended
    plan = planning.next_plan(
        speculation,
        uid=deployment.uid,
        draft=learned.draft,
        found=found,
        rows=rows,
        before=learned.plan,
        running=[report.plan for report in observed.reports],
        pin=pin,
    )
    moved = [change for change in chosen.changes if pin is None or pin.shape_of(change.row.task) is None]
    changes = _records(moved, learned, found, now) if follows else ()
    return (
        learned.model_copy(update={"rows": rows, "swept_at": chosen.swept_at, "plan": plan}),
        plan,
        changes,
        recommended,
    )


def _held_back(observed: Observation, plan: Plan | None) -> set[tuple[int, int]]:
    """Loads at which every guard that has a verdict on this plan's shapes runs plainly."""
    verdicts: dict[tuple[int, int], bool] = {}
    for report in observed.reports:
        if plan is not None and report.plan.version == plan.version:
            for cell in report.guard:
                load = (cell.concurrency, cell.context)
                verdicts[load] = verdicts.get(load, True) and cell.suppressed
    return {load for load, suppressed in verdicts.items() if suppressed}


def _records(
    changes: Iterable[Change], learned: LearnedState, found: Buckets, now: float
) -> tuple[DecisionRecord, ...]:
    """One record for all rows of a task that moved alike; the row at the present load speaks for them."""
    present = planning.present_row(learned.load, found)
    groups: dict[tuple[str, TreeShape, TreeShape], list[Change]] = {}
    for change in changes:
        groups.setdefault((change.row.task, change.before, change.row.shape), []).append(change)
    records = []
    for (task, before, after), group in groups.items():
        first = min(group, key=lambda change: (change.row.concurrency, change.row.context) != present)
        load = f"{bucket_text(found, first.row.concurrency, first.row.context)}, task {task}"
        records.append(
            DecisionRecord(
                time=history.when(now),
                measured=history.measured(learned, task),
                load=load if len(group) == 1 else f"{load} and {len(group) - 1} other loads",
                before=str(before),
                after=str(after),
                expected_gain_percent=None if first.gain is None else round(100 * first.gain, 1),
                cause=first.cause,
                reason=first.reason,
            )
        )
    return tuple(records)


def _recommended(chosen: Chosen, learned: LearnedState, found: Buckets) -> str | None:
    present = planning.present_row(learned.load, found)
    rows = [row for row in chosen.rows if (row.concurrency, row.context) == present]
    own = (row for row in rows if row.task == learned.load.task)
    return next((str(row.shape) for row in (*own, *rows)), None)


def depth_in_use(
    deployment: Deployment, observed: Observation, learned: LearnedState, plan: Plan, found: Buckets
) -> int | None:
    """Depth of the row at the present load, as soon as a worker says that it runs this plan."""
    if deployment.spec.speculation.method == "none":
        return None
    running = [report for report in observed.reports if report.plan.version == plan.version]
    if not running:
        return None
    if all(report.draft.problem for report in running):
        return 0
    concurrency, context = planning.present_row(learned.load, found)
    if (concurrency, context) in _held_back(observed, plan):
        return 0
    if not any(report.plan.matches_draft for report in running):
        return plan.initial.depth
    row = plan.row(concurrency, context, learned.load.task)
    return row.shape.depth if row else plan.initial.depth


def nodes_in_use(plan: Plan, learned: LearnedState, found: Buckets, depth: int | None) -> int | None:
    """Draft tokens of the shape in use; none where plain decoding runs."""
    if not depth:
        return depth
    row = plan.row(*planning.present_row(learned.load, found), learned.load.task)
    return (row.shape if row else plan.initial).nodes


def task_depths(deployment: Deployment, plan: Plan, learned: LearnedState, found: Buckets) -> dict[str, int]:
    concurrency, context = planning.present_row(learned.load, found)
    depths = {}
    for name in [task.name for task in deployment.spec.speculation.tasks]:
        row = plan.row(concurrency, context, name)
        depths[name] = row.shape.depth if row else plan.initial.depth
    return depths
