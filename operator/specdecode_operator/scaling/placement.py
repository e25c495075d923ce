"""Workers without a node: whether readings are complete without them, when to withdraw them and when to try again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from specdecode_operator.api.v1alpha1 import ScalingSpec
from specdecode_operator.scaling.tuning import TUNING
from specdecode_operator.state.learned import ScalingState
from specdecode_operator.types import Worker, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Numbers of workers with and without a node. The default has none without."""

    placed: int = 0
    unplaced: int = 0
    """Pods without a node, and replicas whose pods the ReplicaSet could not create."""
    oldest_created_at: float | None = None
    """Creation time of the oldest pod without a node, in seconds since the epoch."""
    is_node_held: bool = False
    """A terminating worker still holds its node, which a pod without a node may be waiting for."""


def placement_of(workload: Workload | None, workers: Sequence[Worker]) -> Placement:
    """Return how many workers have a node."""
    staying = [worker for worker in workers if not worker.leaving]
    pending = [worker for worker in staying if not worker.placed]
    uncreated = max(0, workload.wanted - workload.replicas) if workload and workload.replica_failure else 0
    created = [worker.created_at for worker in pending if worker.created_at is not None]
    return Placement(
        placed=len(staying) - len(pending),
        unplaced=len(pending) + uncreated,
        oldest_created_at=min(created, default=None),
        is_node_held=any(worker.leaving and worker.placed for worker in workers),
    )


def is_complete(workload: Workload | None, workers: Sequence[Worker]) -> bool:
    """Return whether every placed worker is ready and has reported, and no rollout or scaling is under way.

    Workers without a node are not waited for.
    """
    if workload is None or workload.observed_generation < workload.generation:
        return False
    staying = [worker for worker in workers if not worker.leaving]
    pending = sum(not worker.placed for worker in staying)
    uncreated = max(0, workload.wanted - workload.replicas) if workload.replica_failure else 0
    return (
        workload.updated == workload.replicas == workload.wanted - uncreated
        and workload.available + pending == workload.replicas
        and all(worker.ready and worker.report is not None for worker in staying if worker.placed)
    )


def follow_placement(
    spec: ScalingSpec, state: ScalingState, placement: Placement, *, replicas: int, now: float
) -> ScalingState:
    """Withdraw workers that had no node for the time-out; they are tried again later, with back-off.

    Args:
        spec: Bounds of the replicas; no worker below the lower one is withdrawn.
        state: State after the previous decision.
        placement: Workers with and without a node.
        replicas: Replicas that are set at present.
        now: Present time, in seconds since the epoch.

    Returns:
        The state with the remaining replicas.
    """
    state = state.model_copy(update={"replicas": replicas})
    if placement.unplaced == 0:
        return _without_unplaced(state, placement)
    since = placement.oldest_created_at
    if since is None:
        since = now if state.unplaced_since is None else state.unplaced_since
    remaining = max(spec.min_replicas, placement.placed)
    is_overdue = now - since >= TUNING.placement_timeout_seconds and not placement.is_node_held
    if not is_overdue or remaining >= replicas:
        return state.model_copy(update={"unplaced_since": since})
    return state.model_copy(
        update={
            "replicas": remaining,
            "above_polls": 0,
            "unplaced_since": None,
            "placed_limit": remaining,
            "retry_at": now + _retry_seconds(state.withdrawals),
            "withdrawals": state.withdrawals + 1,
        }
    )


def upper_bound(spec: ScalingSpec, state: ScalingState, now: float) -> int:
    """Return the most replicas that may be set now: maxReplicas, or fewer until withdrawn workers are tried again."""
    if state.placed_limit is None or state.retry_at is None or now >= state.retry_at:
        return spec.max_replicas
    return min(spec.max_replicas, max(spec.min_replicas, state.placed_limit))


def withdrawal_message(spec: ScalingSpec, state: ScalingState, wanted: int, now: float) -> str | None:
    """Return why fewer than the ``wanted`` workers are set, if withdrawn workers are not tried again yet."""
    bound = upper_bound(spec, state, now)
    if wanted <= bound or bound == spec.max_replicas or state.retry_at is None:
        return None
    retry = datetime.fromtimestamp(state.retry_at, UTC).strftime("%H:%M")
    return f"demand asks for {wanted} workers, but only {bound} could be placed; the next attempt is at {retry} UTC"


def _retry_seconds(withdrawals: int) -> float:
    """Return the back-off after so many withdrawals in a row."""
    return min(TUNING.max_retry_seconds, TUNING.retry_seconds * 2.0 ** min(withdrawals, 10))


def _without_unplaced(state: ScalingState, placement: Placement) -> ScalingState:
    """Return the state after every worker got a node; more workers than the limit end the back-off."""
    state = state.model_copy(update={"unplaced_since": None})
    if state.placed_limit is None or placement.placed <= state.placed_limit:
        return state
    return state.model_copy(update={"placed_limit": None, "retry_at": None, "withdrawals": 0})
