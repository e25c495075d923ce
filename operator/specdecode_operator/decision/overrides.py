"""What people say beyond the spec's bounds, mode and pin, laid over what was measured. Pure; used by decide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from specdecode_operator.api.pins import Pin, read_pin
from specdecode_operator.api.v1alpha1 import Decision
from specdecode_operator.decision import history
from specdecode_operator.decision.size_stage import ReplicaDecision
from specdecode_operator.errors import SpecError
from specdecode_operator.state.learned import LearnedState, RowState
from specdecode_operator.types import Deployment


def remembered(deployment: Deployment, learned: LearnedState) -> LearnedState:
    """The memory; one that was lost takes the history back from the status."""
    told = deployment.status.speculation.history if deployment.status.speculation else ()
    return learned.model_copy(update={"uid": deployment.uid, "history": learned.history or told})


def pinned(deployment: Deployment, learned: LearnedState) -> tuple[LearnedState, Pin | None, str | None]:
    """The pin in force: what the annotation says if it reads, else what was in force, and why it does not read."""
    speculation = deployment.spec.speculation
    if deployment.paused:
        return learned, None, None
    try:
        pin = read_pin(deployment.pin, speculation)
        return learned.model_copy(update={"pin": deployment.pin.strip()}), pin, None
    except SpecError as error:
        problem = str(error)
    try:
        return learned, read_pin(learned.pin, speculation), problem
    except SpecError:
        return learned.model_copy(update={"pin": ""}), None, problem  # the spec has changed under it


def unpinned(chosen: Iterable[RowState], learned: Iterable[RowState], pin: Pin | None) -> tuple[RowState, ...]:
    """The rows to remember: those of pinned tasks wait as they are, nothing is learnt from what they do not run."""
    if pin is None:
        return tuple(chosen)
    known = {(row.task, row.concurrency, row.context): row for row in learned}
    return tuple(
        row if pin.shape_of(row.task) is None else known.get((row.task, row.concurrency, row.context), row)
        for row in chosen
    )


def advised(
    deployment: Deployment, sized: ReplicaDecision, before: LearnedState, learned: LearnedState
) -> tuple[ReplicaDecision, LearnedState]:
    """Mode Advisory: what demand asks for is told, and replicas and pods stay as they are."""
    scaling = deployment.spec.scaling
    if scaling is None or scaling.owner != "Operator" or deployment.spec.speculation.mode != "Advisory":
        return sized, learned
    start = deployment.spec.replicas if before.scaling.replicas is None else before.scaling.replicas
    replicas = max(scaling.min_replicas, min(scaling.max_replicas, start))
    memory = learned.scaling.model_copy(update={"replicas": replicas})
    return replace(sized, replicas=replicas, deletion_costs={}), learned.model_copy(update={"scaling": memory})


def recorded(
    deployment: Deployment, before: LearnedState, learned: LearnedState, wanted: int | None, now: float
) -> tuple[LearnedState, tuple[Decision, ...]]:
    """Decisions other than rows that moved: a mode or a pin that somebody set, workers that come or go."""
    if deployment.paused:
        return learned, ()
    steering = f"pin {learned.pin}" if learned.pin else f"mode {deployment.spec.speculation.mode}"
    by_pin = learned.pin != before.pin
    reason = "annotation specdecode.io/pin" if by_pin else "spec.speculation.mode"
    found = [history.steered(before.steering, steering, "pin" if by_pin else "mode", reason, now)]
    scaling = deployment.spec.scaling
    if scaling is not None and scaling.owner == "Operator":
        moved = before.scaling.replicas, learned.scaling.replicas
        why = f"demand asks for {wanted} workers"
        found.append(history.scaled(*moved, history.measured(learned, learned.load.task), why, now))
    return learned.model_copy(update={"steering": steering}), tuple(step for step in found if step)
