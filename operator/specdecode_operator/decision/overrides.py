"""Pins and mode Advisory: what the user prescribes, laid over what was measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from specdecode_operator.api.pins import Pin, read_pin
from specdecode_operator.decision.size_stage import ReplicaDecision
from specdecode_operator.errors import SpecError
from specdecode_operator.state.learned import RowState, ScalingState
from specdecode_operator.types import Deployment


@dataclass(frozen=True, slots=True, kw_only=True)
class PinState:
    """The pin in force."""

    pin: Pin | None
    text: str
    """The annotation that the pin was read from; empty without a pin."""
    problem: str | None = None
    """Reason why the present annotation cannot be used. The last valid pin stays in force."""


def read_pin_state(deployment: Deployment, last: str) -> PinState:
    """Read the annotation specdecode.io/pin.

    Args:
        deployment: The deployment with its annotation.
        last: Text of the pin that was in force so far.
    """
    speculation = deployment.spec.speculation
    if deployment.paused:
        return PinState(pin=None, text=last)
    try:
        return PinState(pin=read_pin(deployment.pin, speculation), text=deployment.pin.strip())
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


def advise_replicas(
    deployment: Deployment, sized: ReplicaDecision, before: ScalingState, after: ScalingState
) -> tuple[ReplicaDecision, ScalingState]:
    """In mode Advisory keep replicas and pods as they are, and only report what demand asks for."""
    scaling = deployment.spec.scaling
    if scaling is None or scaling.owner != "Operator" or deployment.spec.speculation.mode != "Advisory":
        return sized, after
    start = deployment.spec.replicas if before.replicas is None else before.replicas
    replicas = max(scaling.min_replicas, min(scaling.max_replicas, start))
    advised = replace(sized, replicas=replicas, deletion_costs={})
    return advised, after.model_copy(update={"replicas": replicas})
