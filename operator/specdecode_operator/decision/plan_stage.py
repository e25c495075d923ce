"""Stage 4, plan: rows, pins and capture rules become the plan of the workers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pydantic import ValidationError

from specdecode_operator.api.speculation import Pin, pin_text, read_pin
from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.decision import history
from specdecode_operator.errors import SpecError
from specdecode_operator.planning import loads, plan_rows, task_bounds, workload
from specdecode_operator.planning.decision_rule import Change
from specdecode_operator.planning.loads import bucket_text
from specdecode_operator.planning.plan_rows import Chosen
from specdecode_operator.rollout.runs import assignment_of
from specdecode_operator.scaling import kv_tokens
from specdecode_operator.state.learned import DraftRecord, LearnedState, RowState
from specdecode_operator.times import iso, seconds_of
from specdecode_operator.types import Deployment, Observation
from specdecode_worker.contract import Buckets, Plan, PlanState, TreeShape, suppressed_loads
from specdecode_worker.contract.capture import CaptureRules

# Pins: shapes that the user prescribes, laid over what was measured. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class PinState:
    """The pin in force."""

    pin: Pin | None
    text: str
    """Text of the pin; empty without one."""
    problem: str | None = None
    """Reason why the present pin cannot be used. The last valid pin stays in force."""


def read_pin_state(deployment: Deployment, last: str) -> PinState:
    """Read the pins of the spec.

    Args:
        deployment: The deployment with its spec.
        last: Text of the pin that was in force so far.
    """
    speculation = deployment.spec.speculation
    if deployment.spec.paused:
        return PinState(pin=None, text=last)
    text = pin_text(speculation)
    try:
        return PinState(pin=read_pin(text, speculation), text=text)
    except SpecError as error:
        problem = str(error)
    try:
        return PinState(pin=read_pin(last, speculation), text=last, problem=problem)
    except SpecError:  # the spec has changed since the pin was valid
        return PinState(pin=None, text="", problem=problem)


def without_pinned(chosen: Iterable[RowState], known: Iterable[RowState], pin: Pin | None) -> tuple[RowState, ...]:
    """Return the rows to persist: those of pinned tasks as they were, because what does not run teaches nothing."""
    if pin is None:
        return tuple(chosen)
    before = {(row.task, row.concurrency, row.context): row for row in known}
    return tuple(
        row if pin.shape_of(row.task) is None else before.get((row.task, row.concurrency, row.context), row)
        for row in chosen
    )


# Capture of requests in the plan, from the spec and the stored rollout of drafts. Pure.

_FIELDS = {"share": "percent", "task_shares": "percentByTask", "max_age_seconds": "maxAge", "redact": "redact"}
"""Field of the spec by field of the plan, for errors."""


def capture_rules(deployment: Deployment, record: DraftRecord) -> CaptureRules | None:
    """Return the capture that the plan switches on; None where the spec has none.

    Raises:
        SpecError: A value is out of range. The message names the field.
    """
    capture = deployment.spec.distillation.capture
    if capture is None:
        return None
    try:
        return CaptureRules(
            share=capture.percent / 100,
            task_shares={task: percent / 100 for task, percent in sorted(capture.percent_by_task.items())},
            max_age_seconds=seconds_of(capture.max_age),
            redact=capture.redact,
            consent=capture.consent,
            delete_before=record.captures_deleted_before,
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = _FIELDS.get(str(first["loc"][0]), str(first["loc"][0]))
        raise SpecError(f"distillation.capture.{name}: {first['msg']} (it is {first['input']})") from error


# Stage 2, plan: the rows of the speculation plan under mode and pin, and the reason of every change. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Result of the stage."""

    plan: Plan
    rows: tuple[RowState, ...]
    """Rows to persist; those of pinned tasks are unchanged."""
    swept_at: float
    changes: tuple[DecisionRecord, ...]
    """Changes of rows made now."""
    recommended: str | None
    """Shape that mode Auto would run at the present load. None unless mode or pin keeps it from running."""
    pin: PinState


def plan(
    deployment: Deployment, observed: Observation, learned: LearnedState, buckets: Buckets, *, now: float
) -> Planned:
    """Choose the rows and make the plan. A paused deployment keeps its plan; mode Advisory changes nothing either."""
    pinned = read_pin_state(deployment, learned.pin)
    chosen = _choose(deployment, observed, learned, buckets, now)
    speculation, pin = deployment.spec.speculation, pinned.pin
    follows = task_bounds.follows(speculation) and not deployment.spec.paused
    advised = speculation.mode == "Advisory" or (speculation.mode == "Auto" and pin is not None)
    recommended = _recommended(chosen, learned, buckets) if advised else None
    if deployment.spec.paused and learned.plan is not None:
        return Planned(
            plan=learned.plan,
            rows=learned.rows,
            swept_at=learned.swept_at,
            changes=(),
            recommended=recommended,
            pin=pinned,
        )
    rows = without_pinned(chosen.rows, learned.rows, pin) if follows else learned.rows
    moved = [change for change in chosen.changes if pin is None or pin.shape_of(change.row.task) is None]
    return Planned(
        plan=_next_plan(deployment, observed, learned, buckets, rows, pin),
        rows=tuple(rows),
        swept_at=chosen.swept_at,
        changes=records(moved, learned, buckets, now) if follows else (),
        recommended=recommended,
        pin=pinned,
    )


def _choose(
    deployment: Deployment, observed: Observation, learned: LearnedState, buckets: Buckets, now: float
) -> Chosen:
    speculation, step_tokens = deployment.spec.speculation, deployment.spec.step_tokens
    if not task_bounds.plans(speculation):
        return Chosen(rows=learned.rows, swept_at=learned.swept_at)
    return plan_rows.choose(
        speculation,
        learned,
        buckets,
        max_num_seqs=deployment.spec.engine.max_num_seqs,
        now=now,
        held_back=held_back_loads(observed, learned.plan),
        kv_tokens=kv_tokens(observed),
        objective=workload.objective_of(speculation.objective, learned, observed.last_reports, step_tokens),
    )


def _next_plan(
    deployment: Deployment,
    observed: Observation,
    learned: LearnedState,
    buckets: Buckets,
    rows: Iterable[RowState],
    pin: Pin | None,
) -> Plan:
    return plan_rows.next_plan(
        deployment.spec.speculation,
        uid=deployment.uid,
        draft=learned.draft,
        found=buckets,
        rows=rows,
        before=learned.plan,
        running=[report.plan for report in observed.reports],
        pin=pin,
        assignment=assignment_of(observed.session.drafts, deployment),
        capture=capture_rules(deployment, observed.session.drafts),
        prefill=observed.prefill_addresses,
    )


def records(
    changes: Iterable[Change], learned: LearnedState, buckets: Buckets, now: float
) -> tuple[DecisionRecord, ...]:
    """Return one record for all rows of a task that changed in the same way, that of the present load last."""
    present = loads.present_row(learned.load, buckets)
    groups: dict[tuple[str, TreeShape, TreeShape], list[Change]] = {}
    for change in changes:
        groups.setdefault((change.row.task, change.before, change.row.shape), []).append(change)
    # The status shows the last record as the latest decision.
    ordered = sorted(groups.values(), key=lambda group: any(change.row.load == present for change in group))
    return tuple(_record(group, present, learned, buckets, now) for group in ordered)


def _record(
    group: list[Change], present: tuple[int, int], learned: LearnedState, buckets: Buckets, now: float
) -> DecisionRecord:
    """Return the record of rows that changed in the same way, led by a row that was decided at its own load."""
    led = sorted(group, key=lambda change: (change.follows, change.row.load != present, change.row.load))
    first, followers = led[0], [change.row.load for change in led if change.follows]
    rest = f"; {bucket_text(buckets, followers)} follows" if followers and not first.follows else ""
    return DecisionRecord(
        time=iso(now),
        measured=history.measured(learned, first.row.task),
        load=f"{bucket_text(buckets, (change.row.load for change in led))}, task {first.row.task}",
        before=str(first.before),
        after=str(first.row.shape),
        expected_gain_percent=None if first.gain is None else round(100 * first.gain, 1),
        cause=first.cause,
        reason=first.reason + rest,
    )


def _recommended(chosen: Chosen, learned: LearnedState, buckets: Buckets) -> str | None:
    present = loads.present_row(learned.load, buckets)
    rows = [row for row in chosen.rows if row.load == present]
    own = (row for row in rows if row.task == learned.load.task)
    return next((str(row.shape) for row in (*own, *rows)), None)


# Shapes that workers run at the present load, as status and metrics show them, and who needs the plan.


def held_back_loads(observed: Observation, plan: Plan | None) -> set[tuple[int, int]]:
    """Return the loads (concurrency, context) where the guards of all workers suppress speculation."""
    return suppressed_loads(observed.reports, plan.version) if plan is not None else set()


@dataclass(frozen=True, slots=True)
class InUse:
    """Shapes at the present load."""

    depth: int | None = None
    """Draft depth. None while no worker reports that it runs the plan."""
    nodes: int | None = None
    """Draft tokens of the shape; 0 for plain decoding. None where the depth is unknown."""
    suspended: TreeShape | None = None
    """Shape of the plan that the guards of all workers suspend. None if they suspend none."""


def in_use(deployment: Deployment, observed: Observation, learned: LearnedState, plan: Plan, buckets: Buckets) -> InUse:
    """Return the shapes that workers run at the present load."""
    present = loads.present_row(learned.load, buckets)
    shape = plan.shape(*present, learned.load.task)
    is_held_back = present in held_back_loads(observed, plan)
    suspended = shape if shape.nodes and is_held_back else None
    running = [report for report in observed.reports if report.plan.version == plan.version]
    if deployment.spec.speculation.method == "none" or not running:
        return InUse(suspended=suspended)
    if is_held_back or all(report.draft.problem for report in running):
        return InUse(0, 0, suspended)
    if not any(report.plan.matches_draft for report in running):
        return InUse(plan.initial.depth, shape.nodes if plan.initial.depth else 0, suspended)
    return InUse(shape.depth, shape.nodes, suspended)


def task_depths(deployment: Deployment, plan: Plan, learned: LearnedState, buckets: Buckets) -> dict[str, int]:
    """Return the draft depth of every task of the spec at the present load."""
    concurrency, context = loads.present_row(learned.load, buckets)
    names = [task.name for task in deployment.spec.speculation.tasks]
    return {name: plan.shape(concurrency, context, name).depth for name in names}


def workers_to_push(observed: Observation, plan: Plan, excluded: Collection[str]) -> tuple[str, ...]:
    """Return the addresses of workers that report a lower plan version, or the plan of another deployment.

    Args:
        observed: Workers with their reports.
        plan: The plan that all workers should run.
        excluded: Addresses of workers that run a plan of their own.
    """
    return tuple(
        worker.address
        for worker in (*observed.workers, *observed.prefill)
        if worker.address and worker.report and not worker.leaving and worker.address not in excluded
        if _needs(worker.report.plan, plan)
    )


def _needs(running: PlanState, plan: Plan) -> bool:
    return running.uid != plan.uid or running.version < plan.version or running.quiet != plan.quiet
