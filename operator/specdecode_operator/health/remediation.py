"""Remediation of unhealthy workers: they are reported, run without speculation, and are replaced if the spec allows.

A replacement takes two steps. ``Remediation.recycle`` proposes a pod, in every decision until the eviction succeeded.
An eviction that a PodDisruptionBudget blocks leaves the pod as it is, so it stays proposed. The pod counts as replaced
only when a later observation shows that it terminates or is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_operator.health import pod_health
from specdecode_operator.health.pod_health import TUNING
from specdecode_operator.planning import task_bounds
from specdecode_operator.state.learned import LearnedState, PodState
from specdecode_operator.types import Deployment, Observation, Remediation, UnhealthyWorker, Worker
from specdecode_worker.contract import Plan, TreeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class HealInputs:
    """Everything that the remediation depends on."""

    now: float
    """Present time, in seconds since the epoch."""
    workers: tuple[Worker, ...]
    pods: tuple[PodState, ...]
    """Health of the workers."""
    plan: Plan
    """Plan of the healthy workers."""
    can_disable: bool = True
    """Speculation may be turned off for a worker: the plan is applied, and the spec allows depth 0."""
    can_replace: bool = False
    """Workers may be replaced: spec.workers.recycle is OnCollapse, and the deployment is not paused."""
    is_complete: bool = False
    """Every placed worker is ready and has reported, and no rollout is under way."""
    recycling: str = ""
    """Uid of the worker that the previous decision proposed to evict. Empty if there was none."""
    recycled_at: float | None = None
    """Time of the latest replacement."""


def heal_from(
    deployment: Deployment,
    observed: Observation,
    learned: LearnedState,
    plan: Plan,
    *,
    is_complete: bool,
    now: float,
) -> Remediation:
    """Run the remediation on the objects that ``decide`` has."""
    speculation = deployment.spec.speculation
    is_applied = task_bounds.follows(speculation) and not deployment.spec.paused
    return heal(
        HealInputs(
            now=now,
            workers=observed.workers,
            pods=learned.pods,
            plan=plan,
            can_disable=is_applied and speculation.depth.min == 0,
            can_replace=deployment.spec.workers.recycle == "OnCollapse" and not deployment.spec.paused,
            is_complete=is_complete,
            recycling=learned.recycling,
            recycled_at=learned.recycled_at,
        )
    )


def heal(inputs: HealInputs) -> Remediation:
    """Choose the actions on unhealthy workers."""
    states = {pod.uid: pod for pod in inputs.pods}
    known = [(worker, states[worker.uid]) for worker in inputs.workers if worker.uid in states and not worker.leaving]
    peers = [pod for _, pod in known]  # a worker that has left is nobody's peer
    collapsed = [(worker, pod) for worker, pod in known if pod.collapsed_since is not None]
    disabled = [worker for worker, _ in collapsed if worker.address] if inputs.can_disable else []
    recycled_at = inputs.now if _is_replaced(inputs) else inputs.recycled_at
    evicted = _to_evict(inputs, collapsed, recycled_at)
    plan = plain_plan(inputs.plan)
    return Remediation(
        unhealthy=tuple(one for worker, pod in known for one in _unhealthy(worker, pod, peers, inputs.now)),
        own=frozenset(worker.address for worker in disabled if worker.address),
        own_plans={worker.address: plan for worker in disabled if worker.address and not _runs(worker, plan)},
        recycle=(evicted.name,) if evicted else (),
        recycling=evicted.uid if evicted else _still_expected(inputs, collapsed),
        recycled_at=recycled_at,
    )


def plain_plan(plan: Plan) -> Plan:
    """Return ``plan`` without speculation, for one worker. Shadow drafts continue, so that a recovery shows."""
    return plan.model_copy(update={"rows": (), "initial": TreeShape(()), "quiet": True})


def _runs(worker: Worker, plan: Plan) -> bool:
    """Return whether the worker runs the plain plan. A worker without a report is not asked to."""
    report = worker.report
    return report is None or (report.plan.quiet and report.plan.version == plan.version)


def _is_replaced(inputs: HealInputs) -> bool:
    """Return whether the pod of the previous proposal terminates or is gone."""
    if not inputs.recycling:
        return False
    return all(worker.leaving for worker in inputs.workers if worker.uid == inputs.recycling)


def _still_expected(inputs: HealInputs, collapsed: list[tuple[Worker, PodState]]) -> str:
    """Return the uid of the previous proposal, if its eviction may still be under way."""
    return inputs.recycling if any(worker.uid == inputs.recycling for worker, _ in collapsed) else ""


def _to_evict(inputs: HealInputs, collapsed: list[tuple[Worker, PodState]], recycled_at: float | None) -> Worker | None:
    """Return the worker to evict: the one that collapsed first.

    A worker that is not ready serves nothing, so it goes first and may go at any time. One that is ready goes only
    while all others serve, and not soon after another replacement.
    """
    if not inputs.can_replace:
        return None
    lasting = [
        (worker.ready, pod.collapsed_since, worker.name, worker)
        for worker, pod in collapsed
        if pod.collapsed_since is not None and inputs.now - pod.collapsed_since >= TUNING.replace_after_seconds
    ]
    if not lasting:
        return None
    worker = min(lasting, key=lambda candidate: candidate[:3])[3]
    return worker if not worker.ready or _may_evict_ready(inputs, recycled_at) else None


def _may_evict_ready(inputs: HealInputs, recycled_at: float | None) -> bool:
    """Return whether a ready worker may be evicted."""
    serving = sum(worker.placed and not worker.leaving for worker in inputs.workers)
    is_early = recycled_at is not None and inputs.now - recycled_at < TUNING.replace_interval_seconds
    return inputs.is_complete and serving > 1 and not is_early


def _unhealthy(worker: Worker, pod: PodState, peers: list[PodState], now: float) -> list[UnhealthyWorker]:
    """Return the findings on one worker, for the condition."""
    findings = []
    acceptance, usual = pod_health.expectation(pod) or (None, None)
    step_time = pod_health.relative_pace(pod, peers)
    if pod.collapsed_since is not None:
        findings.append(
            UnhealthyWorker(
                pod=worker.name,
                uid=worker.uid,
                reason="AcceptanceCollapsed",
                message=f"{_fall_message(acceptance, usual)}; its peers are well",
                since=pod.collapsed_since,
                acceptance=acceptance,
                usual=usual,
                pace=step_time,
            )
        )
    if pod.slow_since is not None and step_time is not None and now - pod.slow_since >= TUNING.slow_seconds:
        findings.append(
            UnhealthyWorker(
                pod=worker.name,
                uid=worker.uid,
                reason="SlowSteps",
                message=f"its steps take {step_time:.1f} times as long as those of its peers",
                since=pod.slow_since,
                pace=step_time,
            )
        )
    return findings


def _fall_message(acceptance: float | None, usual: float | None) -> str:
    if acceptance is None or usual is None:
        return "acceptance far below its peers"
    return f"first token accepted {acceptance:.2f}, usually {usual:.2f}"
