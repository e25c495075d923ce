"""History of decisions, and the realised gain of each change of the plan. Pure.

The realised gain is (seconds per token before) / (seconds per token after) - 1, like the speed-up in status. It
compares the first steps after a change with the stored step times of the earlier shape at the same number of sequences.
Steps of batches with several shapes are left out, so a change of one task in a mixed load may have no realised gain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from specdecode_operator import health
from specdecode_operator.api.v1alpha1 import Cause, Decision
from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.planning.figures import interpolated
from specdecode_operator.planning.loads import bucket_of, present_row
from specdecode_operator.state.learned import GainMeasurement, LearnedState, LoadState, StepTimeCell
from specdecode_operator.telemetry.counters import CellKey, Delta, Moments
from specdecode_operator.times import iso
from specdecode_operator.types import Deployment, ReplicaDecision
from specdecode_worker.contract import FEATURES, Buckets, Method, Plan, TreeShape, draft_passes

HISTORY = 10
"""Number of decisions in the history; status shows all of them."""
FOLLOWED, ROWS = 4, 16
"""Number of changes whose gain is measured at the same time, and of rows per change. They bound the stored state."""
LEAST_DRAFTS = 500
"""Number of drafts after a change at which its gain is final; the standard error is then a few percent."""
SAME_SHAPE = 0.15
"""Relative tolerance between the verified tokens of a step and those of a shape. Beyond it the batch is mixed."""

_SEQUENCES = FEATURES.index("sequences")
_VERIFY_TOKENS = FEATURES.index("verify_tokens")


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
        time=iso(now), kind="Steering", load="every load", before=before, after=after, cause=cause, reason=reason
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
            concurrency, context = present_row(load, after.buckets)
            near = sorted(rows[shapes], key=lambda row: (abs(row[1] - context), abs(row[0] - concurrency), row))
            yield GainMeasurement(time=decision.time, before=shapes[0], after=shapes[1], rows=tuple(near[:ROWS]))


def _with_steps(
    follow: GainMeasurement, learned: LearnedState, delta: Delta, buckets: Buckets, method: Method
) -> GainMeasurement:
    """Add the steps of one poll that ran the new shape, at loads whose rows still have it."""
    assert learned.plan is not None, "only a change of a plan is measured"
    before, after = TreeShape.parse(follow.before), TreeShape.parse(follow.after)
    loads = {(concurrency, context) for concurrency, context, task in _unchanged_rows(follow, learned.plan, after)}
    for key, moments in delta.steps.items():
        if not _runs(key, moments, after, method):
            continue
        sequences = moments.mean_of(_SEQUENCES)
        old = _per_token(learned.costs, before, method, key.context_bucket, sequences)
        if old is None or (bucket_of(buckets.concurrency, round(sequences)), key.context_bucket) not in loads:
            continue
        follow = follow.model_copy(
            update={
                "before_seconds": follow.before_seconds + old * moments.emitted,
                "seconds": follow.seconds + moments.seconds * sequences,
                "drafts": follow.drafts + moments.x[_SEQUENCES],
            }
        )
    return follow


def _unchanged_rows(follow: GainMeasurement, plan: Plan, after: TreeShape) -> Iterator[tuple[int, int, str]]:
    """Yield the measured rows that still have the new shape, as (concurrency, context, task)."""
    for concurrency, context, task in follow.rows:
        if plan.shape(concurrency, context, task) == after:
            yield concurrency, context, task


def _runs(key: CellKey, moments: Moments, shape: TreeShape, method: Method) -> bool:
    """Return whether the steps of a cell are decoding steps in which every sequence had this shape."""
    if key.prefill or moments.count < 1 or moments.emitted < 1 or key.draft_passes != draft_passes(method, shape.depth):
        return False
    verified = moments.x[_SEQUENCES] * (shape.nodes + 1)
    return abs(moments.x[_VERIFY_TOKENS] - verified) <= SAME_SHAPE * verified


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
            mean = moments.mean_of(_SEQUENCES)
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
        records.append(scaled(*counts, evidence, sized.reason or f"demand asks for {sized.wanted} workers", now))
    return tuple(record for record in records if record)
