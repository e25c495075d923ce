"""Pods and Deployments of Kubernetes as records: their state, and why they do not start."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from specdecode_operator import manifests
from specdecode_operator.api.v1alpha1 import Spec, Status
from specdecode_operator.errors import ClusterError, SpecError
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import EVENTS
from specdecode_operator.times import seconds_of_timestamp
from specdecode_operator.types import Deployment, Observation, TrainingJob, Worker, Workload
from specdecode_worker.contract import CheckVerdict, Revisions

log = logging.getLogger(__name__)

# Termination messages of containers: the verdict of a worker on its memory and draft, or the end of a log.

CONTAINER = "worker"
"""Container whose termination message may have a verdict."""
PULL_CONTAINER = "pull"
"""Init container whose termination message may have the commits of unpinned models."""


def verdict_of(pod_status: Mapping[str, Any]) -> CheckVerdict | None:
    """Return the verdict of a pod's worker container that ended, or None if its message is not a verdict.

    A pod can write any text as its termination message, so the text is validated.
    """
    for container in pod_status.get("containerStatuses") or []:
        if container.get("name") == CONTAINER:
            return next((verdict for message in _messages(container) if (verdict := _read(message))), None)
    return None


def revisions_of(pod_status: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the commits of the models that a pod's `pull` fetched, by URI. They are validated, as a verdict is."""
    return _read_revisions(str(pull_of(pod_status).get("message") or ""))


def pull_of(pod_status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the termination of a pod's `pull`; empty until it has ended well."""
    for container in pod_status.get("initContainerStatuses") or []:
        ended: Mapping[str, Any] = (container.get("state") or {}).get("terminated") or {}
        if container.get("name") == PULL_CONTAINER and ended.get("exitCode") == 0:
            return ended
    return {}


def last_words(message: str) -> str:
    """Return why a container ended, in one line: the problem of a verdict, or else the last line of the message."""
    verdict = _read(message)
    if verdict:
        return (verdict.problem if not verdict.fits else verdict.draft_problem or "").strip()
    return message.strip().rsplit("\n", 1)[-1]


def _messages(container: Mapping[str, Any]) -> Iterator[str]:
    """Yield the messages of the present and the previous termination."""
    for when in ("state", "lastState"):
        ended = (container.get(when) or {}).get("terminated") or {}
        if ended.get("message"):
            yield str(ended["message"])


def _read(message: str) -> CheckVerdict | None:
    """Parse a verdict. Return None if the message is none."""
    if not message.startswith("{"):
        return None
    try:
        return CheckVerdict.model_validate_json(message)
    except ValidationError:
        return None


def _read_revisions(message: str) -> Mapping[str, str]:
    """Parse the commits that `pull` reported. Return none if the message is something else."""
    if not message.startswith("{"):
        return {}
    try:
        revisions = Revisions.model_validate_json(message).revisions
    except ValidationError:
        return {}
    return {sys.intern(uri): sys.intern(commit) for uri, commit in revisions.items()}


# Events of a pod that say why it does not start, which its status does not.

START_PROBLEMS = frozenset({"FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"})
"""Reasons of Warning events after which a pod stays in ContainerCreating."""


async def mount_problem(client: KubeClient, namespace: str, pod_uid: str) -> str | None:
    """Return reason and message of the latest Warning about the pod's volumes or sandbox, or None.

    Raises:
        ClusterError: The events could not be listed.
    """
    events = await client.list(EVENTS, namespace, fields=f"involvedObject.uid={pod_uid},type=Warning")
    problems = [event for event in events.get("items") or [] if event.get("reason") in START_PROBLEMS]
    if not problems:
        return None
    latest = max(problems, key=_last_time)
    return f"{latest['reason']}: {latest.get('message', '')}".strip(": ")


def _last_time(event: Mapping[str, Any]) -> str:
    """Return when the event occurred last, as RFC 3339 text in UTC, which sorts by time."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return max((time for time in times if time), default=event["metadata"].get("creationTimestamp") or "")


# Conversion of Pods and Deployments of Kubernetes to Worker and Workload records. Pure.

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
        role=(pod["metadata"].get("labels") or {}).get(manifests.ROLE_LABEL, manifests.Role.worker),
        leaving=ended or "deletionTimestamp" in pod["metadata"],
        placed=conditions.get("PodScheduled", "True") == "True",
        created_at=_seconds(pod["metadata"].get("creationTimestamp")),
        trouble=_trouble(status),
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


# Mount problems of pods, read from their Events: the status of a pod does not have them.

MIN_AGE_SECONDS = 15.0
"""Age above which a scheduled pod without an address is checked. Younger pods are still being set up."""
MAX_PODS = 3
"""Number of pods whose Events are read in one reconcile. Pods of one template fail for the same reason."""


async def add_mount_problems(client: KubeClient, namespace: str, observed: Observation, now: float) -> Observation:
    """Return the observation with the mount problems of pods that do not start, of workers and of training Jobs."""
    observed = replace(
        observed, jobs=tuple([await _with_problem(client, namespace, job, now) for job in observed.jobs])
    )
    waiting = [worker for worker in observed.workers if _is_waiting(worker, now)][:MAX_PODS]
    if not waiting:
        return observed
    troubles: dict[str, str | None] = {}
    for worker in waiting:
        try:
            troubles[worker.uid] = await mount_problem(client, namespace, worker.uid)
        except ClusterError as error:
            log.info("%s/%s: its Events cannot be read: %s", namespace, worker.name, error)
    workers = tuple(
        replace(worker, trouble=troubles[worker.uid]) if worker.uid in troubles else worker
        for worker in observed.workers
    )
    return replace(observed, workers=workers)


async def _with_problem(client: KubeClient, namespace: str, job: TrainingJob, now: float) -> TrainingJob:
    if not job.waiting_pod or now - job.waiting_since <= MIN_AGE_SECONDS:
        return job
    try:
        problem = await mount_problem(client, namespace, job.waiting_pod)
    except ClusterError as error:
        log.info("%s/%s: Events of its pod cannot be read: %s", namespace, job.name, error)
        return job
    return replace(job, status=replace(job.status, reason=problem or ""))


def _is_waiting(worker: Worker, now: float) -> bool:
    """Return whether a scheduled pod has no address for too long and its status does not say why."""
    if not worker.placed or worker.ready or worker.leaving or worker.trouble or worker.address:
        return False
    return worker.created_at is not None and now - worker.created_at > MIN_AGE_SECONDS


# Parsing of a SpecDecodeDeployment into the records that decisions use.


def deployment_of(resource: Mapping[str, Any]) -> Deployment:
    """Parse a resource.

    Raises:
        SpecError: The spec is invalid, because the CRD is of another version than this operator.
    """
    metadata = resource["metadata"]
    try:
        spec = Spec.model_validate(resource["spec"])
    except ValidationError as error:
        first = error.errors()[0]
        raise SpecError(f"spec.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return Deployment(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=spec,
        status=status_of_resource(resource),
    )


def status_of_resource(resource: Mapping[str, Any]) -> Status:
    """Return the present status, or an empty one if another version of the operator wrote it."""
    try:
        return Status.model_validate(resource.get("status") or {})
    except ValidationError:
        return Status()
