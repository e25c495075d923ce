"""Stage 5, record: the decision history, and which changes must be persisted at once. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.decision import history
from specdecode_operator.health import pod_health
from specdecode_operator.state.learned import LearnedState
from specdecode_operator.types import Deployment, ReplicaDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Result of the stage."""

    changes: tuple[DecisionRecord, ...]
    """Decisions made now, oldest first; each becomes an Event."""
    learned: LearnedState
    """The state with its history."""


def record(
    deployment: Deployment,
    before: LearnedState,
    after: LearnedState,
    row_changes: tuple[DecisionRecord, ...],
    sized: ReplicaDecision,
    *,
    now: float,
) -> Recorded:
    """Add the decisions of this tick to the history.

    Args:
        deployment: The deployment.
        before: State before the stages plan and size.
        after: State after them.
        row_changes: Changes of plan rows, of the rollout of drafts, and of their drift.
        sized: The replica decision, with its reason.
        now: Operator's clock, in seconds.
    """
    if deployment.spec.paused:
        return Recorded(changes=row_changes, learned=history.recorded(after, row_changes, before.plan))
    steering = f"pin {after.pin}" if after.pin else f"mode {deployment.spec.speculation.mode}"
    changes = (*_other_changes(deployment, before, after, steering, sized, now), *row_changes)
    steered = after.model_copy(update={"steering": steering})
    return Recorded(changes=changes, learned=history.recorded(steered, changes, before.plan))


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
        or pod_health.suspected(before) != pod_health.suspected(after)
    )


def _ownership(learned: LearnedState) -> tuple[object, ...]:
    """Return the part of the scaling state that a restart must not misread as a hand-over of the replicas."""
    state = learned.scaling
    return state.replicas, state.spec_replicas, state.owned, state.retry_at


def _other_changes(
    deployment: Deployment, before: LearnedState, after: LearnedState, steering: str, sized: ReplicaDecision, now: float
) -> tuple[DecisionRecord, ...]:
    """Return records of a mode or pin that was set, and of replicas that changed."""
    by_pin = after.pin != before.pin
    reason = "spec.speculation.pin" if by_pin else "spec.speculation.mode"
    records = [history.steered(before.steering, steering, "pin" if by_pin else "mode", reason, now)]
    scaling = deployment.spec.scaling
    if scaling is not None and scaling.owner == "Operator":
        counts = before.scaling.replicas, after.scaling.replicas
        measured = history.measured(after, after.load.task)
        records.append(
            history.scaled(*counts, measured, sized.reason or f"demand asks for {sized.wanted} workers", now)
        )
    return tuple(record for record in records if record)
