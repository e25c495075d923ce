"""What keeps replicas from following demand, and which pod goes first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from specdecode_operator.api.v1alpha1 import ScalingSpec
from specdecode_operator.types import Capacity, ScalingLimit

UNSCHEDULABLE = "Unschedulable"
"""How the scheduler calls a pod that it finds no place for."""


def limited(spec: ScalingSpec, wanted: int, troubles: Iterable[str], capacity: Capacity | None) -> ScalingLimit | None:
    """``troubles`` are what the kubelet or the scheduler says of pods that do not start."""
    unplaced = [trouble for trouble in troubles if trouble.startswith(UNSCHEDULABLE)]
    if unplaced:
        return ScalingLimit("Unschedulable", f"{len(unplaced)} pods find no place: {unplaced[0]}")
    if wanted > spec.max_replicas:
        return ScalingLimit("AtMaximum", f"demand asks for {wanted} workers, maxReplicas is {spec.max_replicas}")
    if capacity is not None and not capacity.attainable:
        step = f"a step takes {1000 * capacity.step_seconds:.0f} ms"
        return ScalingLimit("ObjectiveOutOfReach", f"{capacity.limited_by} is not kept by a single sequence: {step}")
    return None


def deletion_costs(running: Mapping[str, float], failing: Iterable[str] = ()) -> dict[str, int]:
    """For the annotation controller.kubernetes.io/pod-deletion-cost, by pod: of the ready pods the one with the
    lowest goes first. Pods that fail are below all others, then come those with the fewest running requests."""
    least = set(failing)
    order = sorted(running, key=lambda pod: (pod not in least, running[pod], pod))
    return {pod: rank - (len(order) if pod in least else 0) for rank, pod in enumerate(order)}
