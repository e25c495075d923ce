"""Reasons why replicas do not follow demand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specdecode_operator.api.v1alpha1 import ScalingSpec
from specdecode_operator.types import Capacity, ScalingLimit, Worker, Workload

UNSCHEDULABLE = "Unschedulable"
"""Reason that the scheduler gives for a pod without a suitable node."""


def placement_problem(workload: Workload | None, workers: Iterable[Worker]) -> str | None:
    """Return why workers have no node, in the words of the scheduler or the ReplicaSet. Return None if all have one."""
    staying = [worker for worker in workers if worker.trouble and not worker.leaving]
    troubles = [(worker.placed, worker.trouble or "") for worker in staying]
    unplaced = [trouble for placed, trouble in troubles if not placed or trouble.startswith(UNSCHEDULABLE)]
    if unplaced:
        return f"{len(unplaced)} pods cannot be scheduled: {unplaced[0]}"
    if workload and workload.replica_failure and workload.replicas < workload.wanted:
        return f"{workload.wanted - workload.replicas} pods cannot be created: {workload.replica_failure}"
    return None


def scaling_limit(
    spec: ScalingSpec, wanted: int, capacity: Capacity | None, *, placement_problems: Sequence[str | None] = ()
) -> ScalingLimit | None:
    """Return why replicas do not follow demand. Return None if they do.

    Args:
        spec: Bounds of the replicas.
        wanted: Workers that demand asks for.
        capacity: Capacity of one worker. None while it is unknown.
        placement_problems: Reasons why workers have no node; the first one that is not None counts.
    """
    for problem in placement_problems:
        if problem is not None:
            return ScalingLimit("Unschedulable", problem)
    if wanted > spec.max_replicas:
        return ScalingLimit("AtMaximum", f"demand asks for {wanted} workers, maxReplicas is {spec.max_replicas}")
    if capacity is not None and not capacity.attainable:
        step = f"a step takes {1000 * capacity.step_seconds:.0f} ms"
        message = f"one sequence alone misses the objective ({capacity.limited_by}): {step}"
        return ScalingLimit("ObjectiveOutOfReach", message)
    return None
