"""Progress of a deployment towards its spec: complete, moving, or blocked until a person acts.

Both functions return the reason and the message that the conditions Ready, Stalled, Reconciling and Progressing show.
The terms are those of kstatus: https://github.com/kubernetes-sigs/cli-utils/tree/master/pkg/kstatus
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from specdecode_operator.api.v1alpha1 import GROUP
from specdecode_operator.controller.status.text import enumerated
from specdecode_operator.types import ChildProblem, Decision, Manifest, Observation, Outcome, Worker, Workload

CRASH_SECONDS = 300.0
"""Time without readiness after which a crash loop counts as blocked. A worker recovers by itself from shorter ones, for
example when the model hub does not answer."""
SPEC_HASH_ANNOTATION = f"{GROUP}/spec-hash"
"""Annotation of the workload, see manifests."""

_BLOCKING = (
    ("ImageNotPulled", r"\b(ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull|ImageInspectError)\b"),
    (
        "ObjectMissing",
        r"\bCreateContainerConfigError\b|\b(secrets?|configmaps?|persistentvolumeclaims?) \"[^\"]+\" not found",
    ),
    ("VolumeNotMounted", r"\b(FailedMount|FailedAttachVolume|FailedMapVolume|MountVolume|AttachVolume)\b"),
    ("ContainerNotCreated", r"\b(CreateContainerError|RunContainerError)\b"),
)
"""Reasons for which Kubernetes retries in vain until a person acts, and how a pod's trouble shows them. The first match
counts: a volume whose Secret is missing is a missing object."""
_CHILD_REASONS = {"NotOwned": "ChildNotOwned", "Refused": "ChildRefused", "Unavailable": "ApplyRetrying"}
_BACK_OFF = re.compile(r"(?i)\bback-off \w+ restarting")


class Finding(NamedTuple):
    """Reason in one word, and the message."""

    reason: str
    message: str


class Past(NamedTuple):
    """Facts of the previous status, for states that can be recognised only over time."""

    unready_seconds: float = 0.0
    """Time since the deployment was Ready last; 0 while it is."""
    crashed_pods: frozenset[str] = frozenset()
    """Pods that Stalled named because they crash again and again."""


def find_blocker(observed: Observation, decision: Decision, outcome: Outcome, *, past: Past) -> Finding | None:
    """Return what a person must act on before the deployment can reach its spec, or None.

    Args:
        observed: Children and pods.
        decision: The desired state.
        outcome: Result of applying it.
        past: What the previous status says about readiness.
    """
    if any(problem.reason != "Unavailable" for problem in outcome.problems):
        return _children(outcome.problems)
    return find_worker_blocker(observed, decision, past=past)


def find_worker_blocker(observed: Observation, decision: Decision, *, past: Past) -> Finding | None:
    """Return what keeps workers from being created or from starting until a person acts, or None."""
    return (
        _refusal(observed)
        or _not_created(observed.workload, decision)
        or next(_blocked_pods(observed), None)
        or _crash_loop(observed, past)
        or _late_rollout(observed)
    )


def find_motion(observed: Observation, decision: Decision, outcome: Outcome, *, paused: bool) -> Finding | None:
    """Return what is still under way towards the spec, or None if the deployment is as desired."""
    return _children(outcome.problems) or find_rollout(observed, decision, paused=paused)


def find_rollout(observed: Observation, decision: Decision, *, paused: bool) -> Finding | None:
    """Return the rollout or the scaling that is under way, or None if all wanted workers are available.

    A paused operator applies nothing, so only the workload itself is considered then.
    """
    workload = observed.workload
    if workload is None:
        return Finding("Creating", "the Deployment of the workers does not exist yet")
    if not paused and _is_outdated(workload, decision):
        return Finding("RollingOut", "a new pod template was applied; its rollout has not started")
    if not paused and workload.wanted != decision.replicas:
        return Finding("Scaling", f"{workload.available} of {decision.replicas} workers are available")
    if workload.settled:
        return None
    trouble = next(troubles(observed), None)
    counts = f"{workload.updated} of {workload.wanted} workers run the current pod template"
    message = f"{counts}, {workload.available} are available" + (f"; {trouble}" if trouble else "")
    return Finding(_motion_reason(workload, trouble), message)


def troubles(observed: Observation) -> Iterator[str]:
    """Yield what the kubelet or the scheduler says of each pod that does not start."""
    return (f"pod {worker.name}: {trouble_of(worker)}" for worker in _starting(observed) if worker.trouble)


def trouble_of(worker: Worker) -> str:
    """Return a pod's trouble without the length of the back-off, which grows while nothing else changes."""
    return _BACK_OFF.sub("back-off restarting", worker.trouble or "")


def _starting(observed: Observation) -> list[Worker]:
    waiting = (worker for worker in observed.workers if not worker.leaving and not worker.ready)
    return sorted(waiting, key=lambda worker: worker.name)


def _motion_reason(workload: Workload, trouble: str | None) -> str:
    if trouble and "Unschedulable" in trouble:
        return "Unschedulable"
    if trouble:
        return "WorkerFailing"
    rolling = workload.observed_generation < workload.generation or workload.updated < workload.replicas
    return "RollingOut" if rolling or workload.updated < workload.wanted else "WorkersStarting"


def _is_outdated(workload: Workload, decision: Decision) -> bool:
    """Return whether the workload was read before the desired pod template was applied."""
    desired = next(_workloads(decision), None)
    annotations = (desired or {}).get("metadata", {}).get("annotations") or {}
    spec_hash = annotations.get(SPEC_HASH_ANNOTATION)
    return bool(workload.spec_hash and spec_hash and workload.spec_hash != spec_hash)


def _workloads(decision: Decision) -> Iterator[Manifest]:
    """Yield the Deployments of the decision, that of the workers first."""
    return (child for child in decision.children if child["kind"] == "Deployment")


def _children(problems: Iterable[ChildProblem]) -> Finding | None:
    """Return all problems in one finding; the reason is that of the gravest."""
    ranked = sorted(problems, key=lambda problem: (list(_CHILD_REASONS).index(problem.reason), str(problem)))
    return (
        Finding(_CHILD_REASONS[ranked[0].reason], enumerated([str(problem) for problem in ranked])) if ranked else None
    )


def _refusal(observed: Observation) -> Finding | None:
    """Return why a worker ended before it loaded its model."""
    for worker in _starting(observed):
        verdict = worker.verdict
        if verdict is None or verdict.serves:
            continue
        if not verdict.fits:
            return Finding("DoesNotFit", f"pod {worker.name}: {verdict.problem}")
        if verdict.draft_problem:
            return Finding("DraftRefused", f"pod {worker.name}: {verdict.draft_problem}")
        return Finding("WorkerRefused", f"pod {worker.name}: {verdict.problem}")
    return None


def _not_created(workload: Workload | None, decision: Decision) -> Finding | None:
    if workload is None or not workload.replica_failure:
        return None
    names = (child["metadata"]["name"] for child in _workloads(decision))
    return Finding("PodsNotCreated", f"Deployment {next(names, 'of the workers')}: {workload.replica_failure}")


def _blocked_pods(observed: Observation) -> Iterator[Finding]:
    for reason, pattern in _BLOCKING:
        pods = [f"pod {worker.name}: {trouble_of(worker)}" for worker in _starting(observed)]
        blocked = [text for text in pods if re.search(pattern, text)]
        if blocked:
            yield Finding(reason, enumerated(blocked))


def _crash_loop(observed: Observation, past: Past) -> Finding | None:
    """Return the workers that crash again and again. Between two crashes such a worker looks like one that starts."""
    if past.unready_seconds < CRASH_SECONDS:
        return None
    crashing = []
    for worker in _starting(observed):
        if "CrashLoopBackOff" in trouble_of(worker):
            crashing.append(f"pod {worker.name}: {trouble_of(worker)}")
        elif worker.name in past.crashed_pods:
            crashing.append(f"pod {worker.name}: started again after a crash; it is not ready yet")
    return Finding("WorkerFailing", enumerated(crashing)) if crashing else None


def _late_rollout(observed: Observation) -> Finding | None:
    workload = observed.workload
    if workload is None or workload.stalled is None or workload.settled:
        return None
    return Finding("RolloutTimedOut", "; ".join([workload.stalled, *list(troubles(observed))[:1]]))
