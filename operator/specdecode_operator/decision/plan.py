"""Stage plan: measurements for status, the history of decisions, and the plan of the workers. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from pydantic import ValidationError

from specdecode_operator import health
from specdecode_operator.api.schema import MAX_TEXT
from specdecode_operator.api.speculation import Pin, pin_text, read_pin
from specdecode_operator.api.v1alpha1 import Cause, Decision
from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.errors import SpecError
from specdecode_operator.planning.acceptance import bounds_of, follows, names, objective_of, plans
from specdecode_operator.planning.estimates import TUNING, bucket_of, bucket_text
from specdecode_operator.planning.search import Change, Chosen, choose
from specdecode_operator.rollout.runs import assignment_of
from specdecode_operator.scaling import as_pinned, kv_tokens
from specdecode_operator.state.learned import (
    AcceptanceCell,
    DraftRecord,
    GainMeasurement,
    LearnedState,
    LoadState,
    RowState,
    StepTimeCell,
)
from specdecode_operator.telemetry.counters import (
    NO_REQUESTS,
    NO_STEPS,
    SEQUENCES,
    VERIFY_TOKENS,
    CellKey,
    Delta,
    Moments,
    over,
)
from specdecode_operator.times import iso, seconds_of
from specdecode_operator.types import Deployment, Figures, Observation, ReplicaDecision, Speed, TaskFigures
from specdecode_worker.contract import (
    OTHER_TASK,
    Buckets,
    Method,
    Plan,
    PlanRow,
    PlanState,
    TreeShape,
    draft_passes,
    suppressed_loads,
)
from specdecode_worker.contract.capture import CaptureRules


def figures_of(
    window: Iterable[Delta],
    costs: Iterable[StepTimeCell],
    task_depths: Mapping[str, int],
    *,
    synthetic: bool,
    saved_device_seconds: float | None = None,
) -> Figures:
    """Return the measurements over ``window``, oldest first.

    ``costs`` are used where the window has too few plain steps. ``task_depths`` are those of the rows in use.
    """
    total = over(window)
    overall, speed = speedup(total.steps, costs), None
    if total.drafts >= TUNING.fleet_samples and total.draft_tokens > 0:
        accepted = total.accepted_tokens
        speed = Speed(acceptance_rate=accepted / total.draft_tokens, accepted_length=1 + accepted / total.drafts)
    tasks = {task: _task(total, task, task_depths, overall) for task in sorted({*total.requests, *total.tasks})}
    return Figures(
        running=total.running,
        waiting=total.waiting,
        tokens_per_second=total.output_tokens / total.seconds if total.seconds else 0,
        synthetic=synthetic,
        speed=speed,
        speedup=overall,
        tasks={task: values for task, values in tasks.items() if values != TaskFigures()},
        saved_device_seconds=saved_device_seconds,
    )


def first_acceptance(cells: Iterable[AcceptanceCell]) -> float | None:
    """Return the acceptance rate of the first drafted token over all tasks. It does not depend on the depth in use."""
    first = [cell for cell in cells if cell.depth == 1]
    return _ratio(sum(cell.hits for cell in first), sum(cell.total for cell in first))


def speedup(steps: Mapping[CellKey, Moments], costs: Iterable[StepTimeCell]) -> float | None:
    """Return the speed-up of all decoding steps over plain decoding, time counted for each sequence.

    None if few tokens were decoded, or if plain steps are known for less than half of them.
    """
    compared = list(_compared(steps, costs))
    known = [(moments.mean_of(SEQUENCES), moments, plain) for moments, plain in compared if plain is not None]
    tokens = sum(moments.emitted for moments, _ in compared)
    if tokens < TUNING.fleet_samples or 2 * sum(moments.emitted for _, moments, _ in known) < tokens:
        return None
    return _ratio(sum(each * plain for each, _, plain in known), sum(each * taken.seconds for each, taken, _ in known))


def saved_seconds(delta: Delta, costs: Iterable[StepTimeCell]) -> float:
    """Return the seconds of worker time that speculation saved in ``delta``; losses count negative.

    A worker with several devices saves the result on each.
    """
    return sum(plain - moments.seconds for moments, plain in _compared(delta.steps, costs) if plain is not None)


def interpolated(points: Sequence[tuple[float, float]], sequences: float) -> float | None:
    """Return the seconds per token at ``sequences`` between ``points`` (sequences, seconds per token).

    None if ``sequences`` is too far outside of them.
    """
    reach, points = math.sqrt(TUNING.load_ratio), sorted(points)
    if not points or not points[0][0] / reach <= sequences <= points[-1][0] * reach:
        return None
    known, seconds = zip(*points, strict=True)
    return float(np.interp(sequences, known, seconds))


def _compared(
    steps: Mapping[CellKey, Moments], costs: Iterable[StepTimeCell]
) -> Iterator[tuple[Moments, float | None]]:
    """Yield every kind of decoding step that emitted tokens, with the seconds of plain steps that emit as many.

    None where no plain steps are known at this load. Plain steps are compared with themselves.
    """
    known = {CellKey.of(cell): Moments(cell.values) for cell in costs}
    known |= {key: fresh for key, fresh in steps.items() if key not in known or fresh.count >= TUNING.min_samples}
    points: dict[int, list[tuple[float, float]]] = {}
    for key, moments in known.items():
        if not key.prefill and not key.draft_passes and min(moments.count, moments.emitted, moments.x[SEQUENCES]) >= 1:
            sequences = moments.mean_of(SEQUENCES)
            points.setdefault(key.context_bucket, []).append((sequences, moments.seconds * sequences / moments.emitted))
    for key, moments in steps.items():
        if not key.prefill and min(moments.count, moments.emitted, moments.x[SEQUENCES]) >= 1:
            sequences = moments.mean_of(SEQUENCES)
            plain = interpolated(points.get(key.context_bucket, ()), sequences)
            if plain is not None:  # without drafts the same step is no longer; where it was, the machine was busy
                plain = min(plain, moments.mean_seconds)
            plain_seconds = None if plain is None else plain * moments.emitted / sequences
            yield moments, plain_seconds if plain is None or key.draft_passes else moments.seconds


def _task(total: Delta, task: str, depths: Mapping[str, int], overall: float | None) -> TaskFigures:
    """Return the measurements of one task.

    Tasks share steps, so a task's speed-up is the fleet's x the task's tokens per step / the fleet's tokens per step.
    """
    requests, sums, depth = total.requests.get(task, NO_REQUESTS), total.tasks.get(task, NO_STEPS), depths.get(task, 0)
    accepted = requests.a / requests.d if requests.d >= TUNING.task_samples else None
    decoded = sum(each.decode_tokens for each in total.tasks.values())
    steps = sum(each.decode_steps for each in total.tasks.values())
    gain = None
    if overall is not None and decoded > 0 and sums.decode_steps >= TUNING.task_samples:
        gain = overall * (sums.decode_tokens / sums.decode_steps) / (decoded / steps)
    return TaskFigures(
        acceptance_rate=None if accepted is None else (min(1.0, accepted / depth) if depth else 0.0),
        accepted_length=None if accepted is None else 1 + accepted,
        ttft_seconds=_ratio(sums.ttft_seconds, sums.ttft_count),
        itl_seconds=_ratio(sums.itl_seconds, sums.itl_count),
        speedup=gain,
    )


def _ratio(total: float, count: float) -> float | None:
    return total / count if count > 0 else None


# History of decisions, and the realised gain of each change of the plan.
#
# The realised gain is (seconds per token before) / (seconds per token after) - 1, like the speed-up in status. It
# compares the first steps after a change with the stored step times of the earlier shape at the same number of
# sequences. Steps of batches with several shapes are left out, so a change of one task in a mixed load may have no
# realised gain.

HISTORY = 10
"""Number of decisions in the history; status shows all of them."""
FOLLOWED, ROWS = 4, 16
"""Number of changes whose gain is measured at the same time, and of rows per change. They bound the stored state."""
LEAST_DRAFTS = 500
"""Number of drafts after a change at which its gain is final; the standard error is then a few percent."""
SAME_SHAPE = 0.15
"""Relative tolerance between the verified tokens of a step and those of a shape. Beyond it the batch is mixed."""


def steered(before: str, after: str, cause: Cause, reason: str, now: float) -> Decision | None:
    """Return the record of a change of the mode or the pin.

    Args:
        before: Pin or mode before, as text; empty for a new deployment.
        after: Pin or mode after.
        cause: Cause in the record.
        reason: Reason in the record.
        now: Operator's clock, in seconds.

    Returns:
        The record, or None for a new deployment and if nothing changed.
    """
    if not before or before == after:
        return None
    return Decision(
        time=iso(now),
        kind="Steering",
        load="every load",
        before=before[:MAX_TEXT],
        after=after[:MAX_TEXT],
        cause=cause,
        reason=reason,
    )


def scaled(before: int | None, after: int | None, measured: str, reason: str, now: float) -> Decision | None:
    """Return the record of a change of the replicas.

    Args:
        before: Replicas before; None for a new deployment.
        after: Replicas after.
        measured: Measurements behind the change, in one line.
        reason: Reason in the record.
        now: Operator's clock, in seconds.

    Returns:
        The record, or None for a new deployment and if nothing changed.
    """
    if before is None or after is None or before == after:
        return None
    return Decision(
        time=iso(now),
        kind="Replicas",
        load="replicas",
        cause="up" if after > before else "down",
        before=f"{before}",
        after=f"{after}",
        measured=measured,
        reason=reason,
    )


def measured(learned: LearnedState, task: str) -> str:
    """Return the measurements behind a decision in one line: the load, and acceptance by depth."""
    main = [cell for cell in learned.acceptance if cell.task == task and cell.total and cell.parent == "main"]
    cells = sorted((cell.depth, cell.hits / cell.total) for cell in main)
    rates = ", ".join(f"{rate:.2f}" for _, rate in cells) or "not measured"
    return f"{learned.load.sequences:.1f} sequences a step, acceptance by depth {rates}"


def recorded(learned: LearnedState, decisions: Iterable[Decision], before: Plan | None) -> LearnedState:
    """Add decisions to the history, and start to measure the gain of changed rows.

    Args:
        learned: State with the new plan.
        decisions: New decisions, oldest first.
        before: Plan before the decisions; None if there was none.
    """
    new = tuple(decisions)
    if not new:
        return learned
    following = learned.following
    if before is not None and learned.plan is not None:
        following = (*_new_measurements(new, before, learned.plan, learned.load), *following)[:FOLLOWED]
    return learned.model_copy(
        update={"history": (*reversed(new), *learned.history)[:HISTORY], "following": following},
    )


def realised(learned: LearnedState, delta: Delta, buckets: Buckets, method: Method) -> LearnedState:
    """Add the steps of one poll to the gain measurements, and write finished gains into the history.

    Measurements whose decision is not in the history any more are dropped. ``method`` is that of the draft.
    """
    if not learned.following or learned.plan is None:
        return learned
    known = {(decision.time, decision.before, decision.after) for decision in learned.history}
    remaining = [follow for follow in learned.following if (follow.time, follow.before, follow.after) in known]
    moved = [_with_steps(follow, learned, delta, buckets, method) for follow in remaining]
    done = {
        (follow.time, follow.before, follow.after): round(100 * (follow.before_seconds / follow.seconds - 1), 1)
        for follow in moved
        if follow.drafts >= LEAST_DRAFTS
    }
    return learned.model_copy(
        update={
            "following": tuple(follow for follow in moved if follow.drafts < LEAST_DRAFTS),
            "history": tuple(_with_gain(decision, done) for decision in learned.history),
        }
    )


def _with_gain(decision: Decision, done: dict[tuple[str, str, str], float]) -> Decision:
    gain = done.get((decision.time, decision.before, decision.after))
    return decision if gain is None else decision.model_copy(update={"realised_gain_percent": gain})


def _new_measurements(
    decisions: Iterable[Decision], before: Plan, after: Plan, load: LoadState
) -> Iterator[GainMeasurement]:
    """Yield one measurement for each pair of old and new shape. Rows with the same change are measured together.

    At most ROWS rows are measured, those nearest to the present load: other rows would get too few drafts.
    """
    rows: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
    for row in after.rows:
        shapes = (str(before.shape(row.concurrency, row.context, row.task)), str(row.shape))
        rows.setdefault(shapes, []).append((row.concurrency, row.context, row.task))
    seen: set[tuple[str, str]] = set()
    for decision in decisions:
        shapes = (decision.before, decision.after)
        if decision.kind == "Plan" and shapes in rows and shapes not in seen:
            seen.add(shapes)
            concurrency, context = load.row(after.buckets)
            near = sorted(rows[shapes], key=lambda row: (abs(row[1] - context), abs(row[0] - concurrency), row))
            yield GainMeasurement(time=decision.time, before=shapes[0], after=shapes[1], rows=tuple(near[:ROWS]))


def _with_steps(
    follow: GainMeasurement, learned: LearnedState, delta: Delta, buckets: Buckets, method: Method
) -> GainMeasurement:
    """Add the steps of one poll that ran the new shape, at loads whose rows still have it."""
    assert learned.plan is not None, "only a change of a plan is measured"
    before, after = TreeShape.parse(follow.before), TreeShape.parse(follow.after)
    loads = {row[:2] for row in follow.rows if learned.plan.shape(*row) == after}
    for key, moments in delta.steps.items():
        if not _runs(key, moments, after, method) or moments.seconds <= 0:
            continue
        sequences = moments.mean_of(SEQUENCES)
        old = _per_token(learned.costs, before, method, key.context_bucket, sequences)
        if old is None or (bucket_of(buckets.concurrency, round(sequences)), key.context_bucket) not in loads:
            continue
        follow = follow.model_copy(
            update={
                "before_seconds": follow.before_seconds + old * moments.emitted,
                "seconds": follow.seconds + moments.seconds * sequences,
                "drafts": follow.drafts + moments.x[SEQUENCES],
            }
        )
    return follow


def _runs(key: CellKey, moments: Moments, shape: TreeShape, method: Method) -> bool:
    """Return whether the steps of a cell are decoding steps in which every sequence had this shape."""
    if key.prefill or moments.count < 1 or moments.emitted < 1 or key.draft_passes != draft_passes(method, shape.depth):
        return False
    verified = moments.x[SEQUENCES] * (shape.nodes + 1)
    return abs(moments.x[VERIFY_TOKENS] - verified) <= SAME_SHAPE * verified


def _per_token(
    costs: Iterable[StepTimeCell], shape: TreeShape, method: Method, context: int, sequences: float
) -> float | None:
    """Return the seconds per token of one sequence, interpolated between the timed numbers of sequences.

    Args:
        costs: Stored step times.
        shape: Shape of all sequences of the batch.
        method: Method of the draft.
        context: Context bucket.
        sequences: Number of sequences of the batch.

    Returns:
        None if the shape was not timed near this number of sequences.
    """
    points = []
    for cell in costs:
        moments = Moments(cell.values)
        key = CellKey.of(cell)
        if cell.context_bucket == context and _runs(key, moments, shape, method):
            mean = moments.mean_of(SEQUENCES)
            answering = moments.mean_seconds * (moments.count - cell.made_up)
            points.append((mean, answering * mean / moments.emitted))
    return interpolated(sorted(points), sequences)


# Last stage but one, record: which decisions enter the history, and which changes must be persisted at once.


def record(
    deployment: Deployment,
    before: LearnedState,
    after: LearnedState,
    row_changes: tuple[DecisionRecord, ...],
    sized: ReplicaDecision,
    *,
    now: float,
) -> tuple[LearnedState, tuple[Decision, ...]]:
    """Add the decisions of this tick to the history. Return the state with it, and the decisions, oldest first.

    Args:
        deployment: The deployment.
        before: State before the stages plan and size.
        after: State after them.
        row_changes: Changes of plan rows, of the rollout of drafts, and of their drift.
        sized: The replica decision, with its reason.
        now: Operator's clock, in seconds.
    """
    if deployment.spec.paused:
        return recorded(after, row_changes, before.plan), row_changes
    steering = f"pin {after.pin}" if after.pin else f"mode {deployment.spec.speculation.mode}"
    changes = (*_other_changes(deployment, before, after, steering, sized, now), *row_changes)
    steered = after.model_copy(update={"steering": steering})
    return recorded(steered, changes, before.plan), changes


def is_urgent(before: LearnedState, after: LearnedState) -> bool:
    """Return whether a decision changed that must be persisted before it takes effect, rather than estimates."""
    return (
        before.plan != after.plan
        or before.template != after.template
        or before.revisions != after.revisions
        or _ownership(before) != _ownership(after)
        or before.steering != after.steering
        or before.history != after.history
        or before.uid != after.uid
        or (before.recycled_at, before.recycling) != (after.recycled_at, after.recycling)
        or health.suspected(before) != health.suspected(after)
    )


def _ownership(learned: LearnedState) -> tuple[object, ...]:
    """Return the part of the scaling state that a restart must not misread as a hand-over of the replicas."""
    state = learned.scaling
    return state.replicas, state.spec_replicas, state.owned


def _other_changes(
    deployment: Deployment, before: LearnedState, after: LearnedState, steering: str, sized: ReplicaDecision, now: float
) -> tuple[DecisionRecord, ...]:
    """Return records of a mode or pin that was set, and of replicas that changed."""
    by_pin = after.pin != before.pin
    reason = "spec.speculation.pin" if by_pin else "spec.speculation.mode"
    records = [steered(before.steering, steering, "pin" if by_pin else "mode", reason, now)]
    scaling = deployment.spec.scaling
    if scaling is not None and scaling.owner == "Operator":
        counts = before.scaling.replicas, after.scaling.replicas
        evidence = measured(after, after.load.task)
        bounds = f"spec.scaling allows {scaling.min_replicas} to {scaling.max_replicas} workers"
        records.append(scaled(*counts, evidence, sized.reason or bounds, now))
    return tuple(record for record in records if record)


# Pins: shapes that the user prescribes, laid over what was measured.


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


# Capture of requests in the plan, from the spec and the stored rollout of drafts.

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


# Stage plan: the rows of the speculation plan under mode and pin, and the reason of every change.


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
    is_measured = follows(speculation) and not deployment.spec.paused
    advised = speculation.mode == "Advisory" or (speculation.mode == "Auto" and pin is not None)
    recommended = _recommended(chosen, learned, buckets) if advised else None
    if is_measured and pin is not None and pin.every is None and pin.shape_of(OTHER_TASK) is None:
        chosen = _beside_pins(deployment, observed, learned, buckets, pin, chosen, now)
    paused_plan = learned.plan if deployment.spec.paused else None
    rows = without_pinned(chosen.rows, learned.rows, pin) if is_measured else learned.rows
    moved = [change for change in chosen.changes if pin is None or pin.shape_of(change.row.task) is None]
    return Planned(
        plan=paused_plan or _next_plan(deployment, observed, learned, buckets, rows, pin),
        rows=rows,
        swept_at=learned.swept_at if paused_plan else chosen.swept_at,
        changes=records(moved, learned, buckets, now) if is_measured else (),
        recommended=recommended,
        pin=pinned,
    )


def _choose(
    deployment: Deployment, observed: Observation, learned: LearnedState, buckets: Buckets, now: float
) -> Chosen:
    speculation, step_tokens = deployment.spec.speculation, deployment.spec.step_tokens
    if not plans(speculation):
        return Chosen(rows=learned.rows, swept_at=learned.swept_at)
    return choose(
        speculation,
        learned,
        buckets,
        max_num_seqs=deployment.spec.engine.max_num_seqs,
        now=now,
        held_back=held_back_loads(observed, learned.plan),
        kv_tokens=kv_tokens(observed),
        objective=objective_of(speculation.objective, learned, observed.last_reports, step_tokens),
    )


def _beside_pins(
    deployment: Deployment,
    observed: Observation,
    learned: LearnedState,
    buckets: Buckets,
    pin: Pin,
    without: Chosen,
    now: float,
) -> Chosen:
    """Choose the rows of tasks without a pin for batches in which the others run theirs.

    Rows of pinned tasks are those ``without`` pins. Where ``other`` is pinned, rows that follow it would move.
    """
    speculation = as_pinned(deployment.spec.speculation, pin)
    deployment = replace(deployment, spec=deployment.spec.model_copy(update={"speculation": speculation}))
    free = tuple(row for row in learned.rows if pin.shape_of(row.task) is None)
    beside = _choose(deployment, observed, learned.model_copy(update={"rows": free}), buckets, now)
    pinned = (row for row in without.rows if pin.shape_of(row.task) is not None)
    return replace(beside, rows=(*pinned, *(row for row in beside.rows if pin.shape_of(row.task) is None)))


def _next_plan(
    deployment: Deployment,
    observed: Observation,
    learned: LearnedState,
    buckets: Buckets,
    rows: Iterable[RowState],
    pin: Pin | None,
) -> Plan:
    """Return the plan before if nothing changed, else the next version, which is above those that workers run.

    Workers may run a higher version than the stored one if the state was lost; they would refuse a lower one.
    """
    speculation, before, uid = deployment.spec.speculation, learned.plan, deployment.uid
    is_off = speculation.method == "none" or speculation.mode == "Off"
    # In mode Advisory rows stay, also those of workers that ran more sequences.
    kept = tuple(row for row in rows if row.concurrency <= len(buckets.concurrency))
    planned = kept if plans(speculation) and learned.draft != "" else ()
    plan = Plan(
        uid=uid,
        draft=learned.draft,
        buckets=buckets,
        rows=tuple(PlanRow(concurrency=r.concurrency, context=r.context, task=r.task, shape=r.shape) for r in planned),
        initial=TreeShape.chain(0 if is_off else speculation.initial),
        max_depth=max(bounds_of(speculation, name).most for name in names(speculation)),
        top_k=1 if is_off else speculation.tree.top_k,
        explore=0 if is_off else min(0.5, speculation.limits.explore_percent / 100),
        tasks=tuple(task.for_worker() for task in speculation.tasks),
        assignment=assignment_of(observed.session.drafts, deployment),
        capture=capture_rules(deployment, observed.session.drafts),
        prefill=observed.prefill_addresses,
    )
    plan = pin.over(plan) if pin else plan
    version = before.version if before and before.uid == uid else 0
    seen = max((report.plan.version for report in observed.reports if report.plan.uid == uid), default=0)
    if before is not None and plan.model_copy(update={"version": before.version}) == before and seen <= version:
        return before
    return plan.model_copy(update={"version": max(version, seen) + 1})


def records(
    changes: Iterable[Change], learned: LearnedState, buckets: Buckets, now: float
) -> tuple[DecisionRecord, ...]:
    """Return one record for all rows of a task that changed in the same way, that of the present load last."""
    present = learned.load.row(buckets)
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
        measured=measured(learned, first.row.task),
        load=f"{bucket_text(buckets, (change.row.load for change in led))}, task {first.row.task}",
        before=str(first.before),
        after=str(first.row.shape),
        expected_gain_percent=None if first.gain is None else round(100 * first.gain, 1),
        cause=first.cause,
        reason=first.reason + rest,
    )


def _recommended(chosen: Chosen, learned: LearnedState, buckets: Buckets) -> str | None:
    present = learned.load.row(buckets)
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
    present = learned.load.row(buckets)
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
    concurrency, context = learned.load.row(buckets)
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
