"""Conversion of Pods and Deployments of Kubernetes to Worker and Workload records. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdecode_operator import manifests
from specdecode_operator.kube.termination_message import last_words, pull_of, revisions_of, verdict_of
from specdecode_operator.times import seconds_of_timestamp
from specdecode_operator.types import Worker, Workload

_NO_REVISIONS: Mapping[str, str] = {}
MAX_TROUBLE = 500
"""Longest part of a message of the kubelet or the scheduler that is shown, in characters."""
STARTING = (None, "PodInitializing", "ContainerCreating")
"""Reasons of a waiting container that are normal during a start."""


def worker_of(pod: Mapping[str, Any]) -> Worker:
    """Return the record of one worker pod, without its report."""
    status = pod.get("status", {})
    conditions = {item["type"]: item["status"] for item in status.get("conditions", [])}
    ended = status.get("phase") in ("Succeeded", "Failed")
    ready = conditions.get("Ready") == "True"
    return Worker(
        name=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        address=status.get("podIP"),
        ready=ready,
        leaving=ended or "deletionTimestamp" in pod["metadata"],
        placed=conditions.get("PodScheduled", "True") == "True",
        created_at=_seconds(pod["metadata"].get("creationTimestamp")),
        trouble=_trouble(status),
        startup_seconds=_startup_seconds(pod),
        # The worker serves now, so an earlier verdict does not hold any more.
        verdict=None if ready else verdict_of(status),
        pull_seconds=_pull_seconds(status),
        revisions=revisions_of(status) or _NO_REVISIONS,
    )


def workload_of(deployment: Mapping[str, Any]) -> Workload:
    """Return the record of the child Deployment."""
    status = deployment.get("status", {})
    conditions = {item["type"]: item for item in status.get("conditions", [])}
    progressing = conditions.get("Progressing", {})
    failure = conditions.get("ReplicaFailure", {})
    return Workload(
        generation=deployment["metadata"]["generation"],
        observed_generation=status.get("observedGeneration", 0),
        wanted=deployment["spec"].get("replicas", 1),
        replicas=status.get("replicas", 0),
        updated=status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        available=status.get("availableReplicas", 0),
        stalled=progressing.get("message") if progressing.get("status") == "False" else None,
        replica_failure=failure.get("message") if failure.get("status") == "True" else None,
        template=deployment["spec"]["template"],
        spec_hash=(deployment["metadata"].get("annotations") or {}).get(manifests.SPEC_HASH_ANNOTATION, ""),
    )


def _startup_seconds(pod: Mapping[str, Any]) -> float | None:
    """Return the seconds from the pod's creation until it was ready, or None while it is not."""
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == "Ready" and condition["status"] == "True":
            created = _seconds(pod["metadata"].get("creationTimestamp"))
            ready = _seconds(condition.get("lastTransitionTime"))
            return None if created is None or ready is None else max(0.0, ready - created)
    return None


def _pull_seconds(status: Mapping[str, Any]) -> float | None:
    """Return the duration of the pod's `pull`, in whole seconds as the kubelet knows it."""
    began, ended = (_seconds(pull_of(status).get(name)) for name in ("startedAt", "finishedAt"))
    return None if began is None or ended is None else max(0.0, ended - began)


def _seconds(timestamp: object) -> float | None:
    """Convert a Kubernetes timestamp to seconds since the epoch."""
    return seconds_of_timestamp(str(timestamp)) if timestamp else None


def _trouble(status: Mapping[str, Any]) -> str | None:
    """Return the message of the kubelet or the scheduler that says why the pod does not start, or None."""
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        reason, message = _failure(container)
        if reason not in STARTING:
            return f"{container['name']}: {reason}: {message}".strip(": ")[:MAX_TROUBLE]
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}"[:MAX_TROUBLE]
    return None


def _failure(container: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the reason and the message of a container that does not run; the reason is None if it runs or ended well.

    The kubelet can show the failed run for minutes before it says that it waits for the next attempt. Both are called a
    back-off, so that conditions do not change with every attempt.
    """
    state = container.get("state", {})
    if state.get("terminated", {}).get("exitCode"):
        ended = state["terminated"]
        reason = "CrashLoopBackOff" if container.get("restartCount") else ended.get("reason", "Error")
        return reason, last_words(ended.get("message", ""))
    waiting = state.get("waiting", {})
    before = container.get("lastState", {}).get("terminated", {}).get("message", "")
    return waiting.get("reason"), last_words(before) or waiting.get("message", "")
