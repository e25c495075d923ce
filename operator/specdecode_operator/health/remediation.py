"""What is done about pods that differ: told, kept from speculating, replaced where the spec allows it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_operator import planning
from specdecode_operator.decision.size_stage import trusted
from specdecode_operator.health import pod_health
from specdecode_operator.state.learned import LearnedState, PodState
from specdecode_operator.types import Deployment, Observation, UnhealthyWorker, Worker
from specdecode_worker.contract import Plan, TreeShape

RECYCLE_SECONDS = 60.0
"""A collapse must have lasted so long with speculation off: what heals by itself is left alone."""
RECYCLES_SECONDS = 600.0
"""From one replacement to the next: if new pods collapse too, pods are not the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    suspects: tuple[UnhealthyWorker, ...]
    own: frozenset[str]
    """Addresses of workers that shall not run the common plan."""
    own_plans: dict[str, Plan]
    """By address, of those that do not run theirs yet."""
    recycle: tuple[str, ...]


def verdicts(
    deployment: Deployment, observed: Observation, learned: LearnedState, plan: Plan, *, now: float
) -> tuple[Verdicts, LearnedState]:
    """What to do about each pod, and the memory of a replacement."""
    pods = {pod.uid: pod for pod in learned.pods}
    known = [(worker, pods[worker.uid]) for worker in observed.workers if worker.uid in pods and not worker.leaving]
    collapsed = [(worker, pod) for worker, pod in known if pod.collapsed_since is not None]
    recycle = _recycle(deployment, observed, learned, collapsed, now)
    own = _quieted(deployment, collapsed)
    found = Verdicts(
        suspects=tuple(suspect for worker, pod in known for suspect in _suspects(worker, pod, learned, now)),
        own=frozenset(worker.address for worker in own if worker.address),
        own_plans={worker.address: quiet(plan) for worker in own if worker.address and not _runs(worker, plan)},
        recycle=recycle,
    )
    return found, learned.model_copy(update={"recycled_at": now}) if recycle else learned


def quiet(plan: Plan) -> Plan:
    """The plan without speculation, for one worker. Shadows go on, so that a recovery is seen."""
    return plan.model_copy(update={"rows": (), "initial": TreeShape(()), "quiet": True})


def _quieted(deployment: Deployment, collapsed: list[tuple[Worker, PodState]]) -> list[Worker]:
    """Speculation is off for the pods whose acceptance collapsed, where the spec allows depth 0."""
    speculation = deployment.spec.speculation
    if deployment.paused or not planning.follows(speculation) or speculation.depth.min > 0:
        return []
    return [worker for worker, _ in collapsed]


def _runs(worker: Worker, plan: Plan) -> bool:
    """Whether the quiet plan runs already; a worker that did not report cannot be asked to."""
    report = worker.report
    return report is None or (report.plan.quiet and report.plan.version == plan.version)


def _recycle(
    deployment: Deployment,
    observed: Observation,
    learned: LearnedState,
    collapsed: list[tuple[Worker, PodState]],
    now: float,
) -> tuple[str, ...]:
    """One at a time, the longest collapsed first, while others serve."""
    if deployment.spec.workers.recycle != "OnCollapse" or deployment.paused or not trusted(observed):
        return ()
    if learned.recycled_at is not None and now - learned.recycled_at < RECYCLES_SECONDS:
        return ()
    staying = sum(not worker.leaving for worker in observed.workers)
    lasting = [
        (pod.collapsed_since, worker.name)
        for worker, pod in collapsed
        if pod.collapsed_since is not None and now - pod.collapsed_since >= RECYCLE_SECONDS
    ]
    return (min(lasting)[1],) if lasting and staying > 1 else ()


def _suspects(worker: Worker, pod: PodState, learned: LearnedState, now: float) -> list[UnhealthyWorker]:
    found = []
    figures = pod_health.expectation(pod)
    pace = pod_health.relative_pace(pod, learned.pods)
    acceptance, usual = figures or (None, None)
    if pod.collapsed_since is not None:
        told = f"first token accepted {acceptance:.2f}, usually {usual:.2f}" if figures else "far below its peers"
        found.append(
            UnhealthyWorker(
                pod=worker.name,
                uid=worker.uid,
                reason="AcceptanceCollapsed",
                message=f"{told}; its peers are well",
                since=pod.collapsed_since,
                acceptance=acceptance,
                usual=usual,
                pace=pace,
            )
        )
    if pod.slow_since is not None and pace is not None and now - pod.slow_since >= pod_health.SLOW_SECONDS:
        message = f"its steps take {pace:.1f} times those of its peers"
        found.append(
            UnhealthyWorker(
                pod=worker.name, uid=worker.uid, reason="SlowSteps", message=message, since=pod.slow_since, pace=pace
            )
        )
    return found
