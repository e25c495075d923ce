"""Conditions of a deployment, each computed by one function. build.py adds transition times.

Ready, Stalled and Reconciling follow kstatus, so that `kubectl wait`, Argo CD and Flux read them without further
configuration. Stalled and Reconciling exist only while True, and never both. Reasons are one word.
"""

from __future__ import annotations

from collections.abc import Iterator

from specdecode_operator.api.v1alpha1 import ConditionType
from specdecode_operator.controller.status.condition_state import ConditionState
from specdecode_operator.controller.status.draft_freshness import draft_fresh
from specdecode_operator.controller.status.draft_rollout import draft_rollout
from specdecode_operator.controller.status.progress import (
    Finding,
    Past,
    find_blocker,
    find_motion,
    find_rollout,
    find_worker_blocker,
    troubles,
)
from specdecode_operator.controller.status.router_progress import find_router_blocker, find_router_motion
from specdecode_operator.controller.status.text import enumerated, rounded
from specdecode_operator.manifests import rolling_hash
from specdecode_operator.types import Decision, Deployment, Observation, Outcome, Workload

PAUSED = "spec.paused is true; the operator writes only status"
NAMED_OUTLIERS = 3
"""Outliers that a message names. Each takes a whole sentence."""


def conditions(
    deployment: Deployment, observed: Observation, decision: Decision, outcome: Outcome, *, past: Past, now: float
) -> tuple[ConditionState, ...]:
    """Return all conditions whose feature is in use, the gravest first.

    Args:
        deployment: Spec and previous status.
        observed: Children, pods and reports.
        decision: The desired state.
        outcome: Result of applying it.
        past: What the previous status says about readiness.
        now: Time in seconds since the epoch.
    """
    states = [
        *_summary(deployment, observed, decision, outcome, past),
        available(observed.workload, decision.replicas, next(troubles(observed), None), at_zero=at_zero(deployment)),
        progressing(deployment, observed, decision, past),
        memory_fits(observed),
    ]
    speculation = deployment.spec.speculation
    if speculation.method != "none":
        states += [draft_compatible(observed), workers_healthy(decision)]
        rollout = draft_rollout(deployment, observed, outcome.job_problem)
        states += [state for state in (rollout, draft_fresh(deployment, observed, now)) if state]
    if speculation.method != "none" and speculation.mode != "Off":
        states.append(speculation_effective(deployment, observed, decision))
    if deployment.spec.scaling is not None and deployment.spec.scaling.owner == "Operator":
        states.append(scaling_limited(decision))
    if deployment.spec.router.replicas:
        states.append(routers_ready(deployment, observed))
    if decision.pinned or decision.pin_problem:
        states.append(pinned(decision))
    states.append(reports_fresh(observed, decision))
    return tuple(states)


def stalled(blocker: Finding) -> ConditionState:
    return ConditionState(ConditionType.stalled, "True", *blocker, bad=True)


def not_ready(finding: Finding) -> ConditionState:
    return ConditionState(ConditionType.ready, "False", *finding, bad=True)


def at_zero(deployment: Deployment) -> str:
    """Return what to tell while no worker is wanted."""
    scaling = deployment.spec.scaling
    if scaling is None or scaling.owner == "External" or scaling.min_replicas:
        return "spec.replicas is 0"
    return f"no request came for {scaling.idle_seconds} s; routers hold the next one while a worker starts"


def available(workload: Workload | None, wanted: int, trouble: str | None, *, at_zero: str) -> ConditionState:
    """Return whether at least one worker serves requests. It says nothing about the spec or about speed.

    Args:
        workload: Deployment of the workers.
        wanted: Workers that are wanted.
        trouble: What keeps workers from starting.
        at_zero: Message while no worker is wanted.
    """
    kind = ConditionType.available
    if workload and workload.available > 0:
        return ConditionState(kind, "True", "WorkerAvailable", "at least one worker serves requests")
    if wanted == 0:
        return ConditionState(kind, "False", "ScaledToZero", at_zero)
    if trouble:
        return ConditionState(kind, "False", "WorkerFailing", trouble, True)
    return ConditionState(kind, "False", "WorkersStarting", "no worker serves requests yet", True)


def progressing(deployment: Deployment, observed: Observation, decision: Decision, past: Past) -> ConditionState:
    """Return whether workers are being started, replaced or removed. A blocked rollout makes it False."""
    kind = ConditionType.progressing
    if deployment.spec.paused:
        return ConditionState(kind, "Unknown", "Paused", PAUSED)
    motion = find_rollout(observed, decision, paused=False)
    blocker = find_worker_blocker(observed, decision, past=past)
    if blocker:
        return ConditionState(kind, "False", *blocker)
    if motion:
        return ConditionState(kind, "True", *motion)
    return ConditionState(kind, "False", "Complete", "all workers run the current pod template")


def memory_fits(observed: Observation) -> ConditionState:
    """Return whether the model fits in a worker's memory, as a worker computed before it loaded the model."""
    kind = ConditionType.memory_fits
    refusal = next((verdict for verdict in observed.refusals if not verdict.fits), None)
    if refusal:
        return ConditionState(kind, "False", "DoesNotFit", "\n".join((refusal.problem, *refusal.arithmetic)), True)
    report = next((report for report in observed.last_reports if report.memory), None)
    if report:
        message = f"after the weights there is room for {report.kv_tokens_total} tokens of keys and values"
        return ConditionState(kind, "True", "Fits", message)
    return ConditionState(kind, "Unknown", "NotCheckedYet", "no worker has reported its memory yet")


def draft_compatible(observed: Observation) -> ConditionState:
    """Return whether the draft fits the target. Unless it is required, workers serve without it if it does not."""
    kind = ConditionType.draft_compatible
    refused = next((verdict.draft_problem for verdict in observed.refusals if verdict.draft_problem), None)
    if refused:
        return ConditionState(kind, "False", "DraftRefused", f"{refused}; new workers do not start", True)
    reports = observed.last_reports
    problem = next((report.draft.problem for report in reports if report.draft.problem), None)
    if problem:
        return ConditionState(kind, "False", "DraftRefused", f"{problem}; the target serves without a draft", True)
    if any(report.draft.hash for report in reports):
        return ConditionState(kind, "True", "DraftLoaded", "the draft fits the target")
    return ConditionState(
        kind, "Unknown", "NotLoadedYet", next(_report_problems(observed), "no worker has reported yet")
    )


def speculation_effective(deployment: Deployment, observed: Observation, decision: Decision) -> ConditionState:
    """Return whether speculation is faster than plain decoding, by the latest measurement."""
    kind = ConditionType.speculation_effective
    known = deployment.status.speculation
    now = decision.figures.speedup if decision.figures else None
    speedup = rounded(now if now is not None else (known.speedup if known else None))
    if decision.depth == 0:
        return ConditionState(kind, "False", *_why_plain(observed, decision))
    if decision.measuring and speedup is None:
        return ConditionState(kind, "Unknown", "Measuring", f"{decision.measuring}; the depth stays until then")
    if speedup is None:
        message = "fewer than 500 tokens in the last minute, or no plain steps to compare with"
        return ConditionState(kind, "Unknown", "NotMeasured", message)
    if speedup > 1:
        return ConditionState(kind, "True", "Faster", f"{speedup:.2f} times as fast as plain decoding")
    if speedup == 1:
        message = "as fast as plain decoding; the workers' guards may be running plain decoding"
        return ConditionState(kind, "False", "NoGain", message)
    return ConditionState(kind, "False", "Slower", f"{speedup:.2f} times as fast as plain decoding")


def _why_plain(observed: Observation, decision: Decision) -> Finding:
    """Return why the workers decode plainly at the current load."""
    if decision.suspended:
        shape = f"the workers suspend {decision.suspended} of the plan at the current load"
        return Finding("SuspendedByGuards", f"{shape}: by their guards' latest measurement plain decoding is faster")
    problems = [report.draft.problem for report in observed.last_reports]
    if problems and all(problems):
        return Finding("NoDraft", "no worker can use the draft; DraftCompatible says why")
    return Finding("PlainIsFaster", "plain decoding is faster at the current load, so no draft is used")


def scaling_limited(decision: Decision) -> ConditionState:
    """Return whether something keeps the number of workers below what the demand needs."""
    kind = ConditionType.scaling_limited
    if decision.limited is not None:
        return ConditionState(kind, "True", decision.limited.reason, decision.limited.message, True)
    message = "the number of workers follows the demand within spec.scaling"
    return ConditionState(kind, "False", "WithinBounds", message)


def workers_healthy(decision: Decision) -> ConditionState:
    """Return whether some worker differs from its own past and from its peers."""
    kind = ConditionType.workers_healthy
    if not decision.suspects:
        return ConditionState(kind, "True", "Healthy", "no worker differs from its own past and its peers")
    named = [f"pod {suspect.pod}: {suspect.message}" for suspect in decision.suspects[:NAMED_OUTLIERS]]
    others = len(decision.suspects) - len(named)
    message = "; ".join([*named, *([f"and {others} more"] if others else [])])
    return ConditionState(kind, "False", decision.suspects[0].reason, message, True)


def routers_ready(deployment: Deployment, observed: Observation) -> ConditionState:
    """Return whether all routers serve. While none is ready, the Service selects the workers."""
    kind = ConditionType.routers_ready
    finding = find_router_blocker(deployment, observed) or find_router_motion(deployment, observed)
    if finding is None:
        return ConditionState(kind, "True", "AllRoutersReady", "all routers serve requests")
    serving = observed.routers is not None and observed.routers.ready > 0
    return ConditionState(kind, "False", *finding, bad=not serving)


def pinned(decision: Decision) -> ConditionState:
    """Return whether the pins of the spec are in force. It exists while there are any."""
    kind = ConditionType.pinned
    if decision.pin_problem:
        still = f"; {decision.pinned} stays pinned" if decision.pinned else "; nothing is pinned"
        return ConditionState(kind, "False", "BadPin", decision.pin_problem + still, True)
    message = f"{decision.pinned} runs at every load; the guard stays active"
    return ConditionState(kind, "True", "PinnedBySpec", message)


def reports_fresh(observed: Observation, decision: Decision) -> ConditionState:
    """Return whether every ready worker sends reports. A worker without them keeps serving with its last plan."""
    kind = ConditionType.reports_fresh
    if decision.silent:
        pods = [f"pod {name}: {decision.silent[name]}" for name in sorted(decision.silent)]
        return ConditionState(kind, "False", "ReportsStale", f"no report for some time: {enumerated(pods)}", True)
    if not any(worker.ready and not worker.leaving for worker in observed.workers):
        return ConditionState(kind, "Unknown", "NoWorkers", "no worker is ready")
    return ConditionState(kind, "True", "Reporting", "every ready worker sends reports")


def _summary(
    deployment: Deployment, observed: Observation, decision: Decision, outcome: Outcome, past: Past
) -> list[ConditionState]:
    """Return Ready, and Stalled or Reconciling if one of them is True."""
    blocker = find_blocker(observed, decision, outcome, past=past) or find_router_blocker(deployment, observed)
    if blocker:
        return [stalled(blocker), not_ready(blocker)]
    waiting = _paused(deployment, observed) if deployment.spec.paused else None
    if waiting:
        return [not_ready(waiting)]
    motion = find_motion(observed, decision, outcome, paused=deployment.spec.paused) or find_router_motion(
        deployment, observed
    )
    if motion is None:
        return [_ready(deployment, observed, decision)]
    if deployment.spec.paused:
        return [not_ready(motion)]
    return [ConditionState(ConditionType.reconciling, "True", *motion), not_ready(motion)]


def _paused(deployment: Deployment, observed: Observation) -> Finding | None:
    """Return why a paused deployment is not as its spec wants it, if it is known not to be."""
    if observed.workload is None:
        return Finding("Paused", f"{PAUSED}; nothing was created yet")
    if observed.workload.spec_hash != rolling_hash(deployment.spec):
        return Finding("Paused", f"{PAUSED}; the workers are of an earlier spec")
    return None


def _ready(deployment: Deployment, observed: Observation, decision: Decision) -> ConditionState:
    """Return Ready. A deployment without workers is as its spec wants it, as a Deployment of Kubernetes would be."""
    kind = ConditionType.ready
    if decision.replicas == 0:
        return ConditionState(kind, "True", "ScaledToZero", at_zero(deployment))
    count = observed.workload.available if observed.workload else 0
    message = "the worker is available" if count == 1 else f"all {count} workers are available"
    return ConditionState(kind, "True", "AllWorkersAvailable", message)


def _report_problems(observed: Observation) -> Iterator[str]:
    return (f"pod {worker.name}: {worker.report_problem}" for worker in observed.workers if worker.report_problem)
