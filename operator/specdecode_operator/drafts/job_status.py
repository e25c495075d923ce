"""Training runs as Jobs show them: state, reason, verdict, and where they write."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from specdecode_operator.api.draft import Phase
from specdecode_operator.api.v1alpha1 import Spec
from specdecode_worker.contract import Artifact
from specdecode_worker.contract.distillation import JOB_CONTAINER, DistillationVerdict

# Places of training runs and of their drafts on the claim of ``distillation.storage``. Pure.

_HASH = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*")
"""Form of a draft's hash. It is the name of one folder, so it has no slash and does not begin with a dot."""


def published_prefix(place: str, deployment: str) -> str:
    """Return the URI below which a deployment's new drafts lie, each in a folder with its hash as the name.

    Args:
        place: URI of the claim or of the place in a bucket.
        deployment: Name of the deployment.
    """
    return f"{place}/drafts/{deployment}"


def run_folder(deployment: str, run: str) -> str:
    """Return the folder of a run's checkpoints and data, relative to the claim."""
    return f"distillation/{deployment}/{run}"


def deletion_id(run: str) -> str:
    """Return the id of the Job that deletes a run's folder, in its label."""
    return f"{run}-delete"


def published_hash(uri: str, prefix: str) -> str:
    """Return the hash in the URI of a published draft; empty for other URIs."""
    place, _, name = uri.rstrip("/").rpartition("/")
    return name if place == prefix and _HASH.fullmatch(name) else ""


def problem_of_draft(draft: Artifact | None, prefix: str) -> str:
    """Return why workers must not take a Job's draft; empty if they may."""
    if draft is None:
        return "the verdict is better and names no draft"
    if not _HASH.fullmatch(draft.hash):
        return f"the verdict names a draft with the hash {draft.hash!r}, which is none"
    if draft.uri != f"{prefix}/{draft.hash}":
        return f"the verdict names the draft {draft.uri}, which is not {prefix}/{draft.hash}"
    return ""


# Refusal of a training run by the spec and the phase, in the words of the operator and of the plugin. Pure.


def obstacle_in_spec(spec: Spec) -> str:
    """Return why no training run can begin with this spec; empty if one can."""
    if spec.speculation.method != "eagle3" or spec.speculation.draft is None:
        return f"speculation.method is {spec.speculation.method}; only eagle3 drafts can be trained"
    if spec.distillation.capture is None:
        return "distillation.capture is absent, so there are no requests to train from"
    if spec.distillation.storage is None:
        return "distillation.storage is absent; name a claim that all workers can mount, or a bucket"
    if spec.speculation.mode == "Off":
        return "speculation.mode is Off, so no draft is used"
    return ""


def obstacle_in_phase(phase: str) -> str:
    """Return why no training run can begin in this phase; empty if one can."""
    if phase in (Phase.SERVING, Phase.COOLDOWN):
        return ""
    return f"the phase is {phase}; a run begins in phase {Phase.SERVING} or {Phase.COOLDOWN}"


# Termination messages of containers. A pod can write any text, so it is validated.

Message = TypeVar("Message", bound=BaseModel)


def read_message(message: str, kind: type[Message]) -> Message | None:
    """Return the document in a termination message; None if the message is something else."""
    if not message.startswith("{"):
        return None
    try:
        return kind.model_validate_json(message)
    except ValidationError:
        return None


def last_line(message: str) -> str:
    """Return the last line of a message, which may be the end of a log."""
    return message.strip().rsplit("\n", 1)[-1]


# Status of a distillation Job, read from the manifests of the Job and its pods. Pure.
#
# The words of the scheduler, the kernel (through the kubelet) and the Job controller are passed on as they are.

MAX_REASON = 500
"""Longest reason, in characters."""
_OUT_OF_MEMORY = "OOMKilled"
_STARTING = (None, "", "PodInitializing", "ContainerCreating")
"""Reasons of a waiting container that are normal during a start."""


class JobState(StrEnum):
    """State of a distillation Job."""

    PENDING = "Pending"
    """No pod exists yet, or its containers are being started."""
    UNSCHEDULABLE = "Unschedulable"
    """The scheduler finds no node for the pod."""
    SUSPENDED = "Suspended"
    """The Job waits for its turn in a queue, or was taken off its nodes by it."""
    RUNNING = "Running"
    PREEMPTED = "Preempted"
    """The last pod was preempted or evicted, and a new one has not started yet."""
    RETRYING = "Retrying"
    """The last pod failed, and a new one has not started yet."""
    FAILED = "Failed"
    OUT_OF_MEMORY = "OutOfMemory"
    """The Job failed, and the kernel had killed its last pod for memory."""
    DEADLINE = "DeadlineExceeded"
    """The Job took longer than its deadline."""
    FINISHED = "Finished"
    """The Job wrote a verdict, which may be that the distillation failed."""

    @property
    def is_final(self) -> bool:
        """True if the Job does nothing more."""
        return self in (JobState.FAILED, JobState.OUT_OF_MEMORY, JobState.DEADLINE, JobState.FINISHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """State of a distillation Job with the reason for it.

    ``verdict`` is that of FINISHED.
    ``completed`` says that a pod ended with 0, with a verdict or without.
    """

    state: JobState
    reason: str = ""
    verdict: DistillationVerdict | None = None
    completed: bool = False


def job_status(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> JobStatus:
    """Return the status of a Job.

    Args:
        job: Manifest of the Job.
        pods: Manifests of its pods, in any order.
    """
    pods = sorted(pods, key=_created)
    verdict = next((read for pod in reversed(pods) if (read := _verdict(pod)) is not None), None)
    conditions = _conditions(job)
    if _holds(conditions, "Complete") and verdict is None and pods and not _has_ended(pods[-1]):
        # Job and pods come on two watches, and the end of the Job may arrive before that of its pod.
        return JobStatus(state=JobState.RUNNING)
    if _holds(conditions, "Complete") or verdict is not None:
        return _finished(verdict, pods)
    if _holds(conditions, "Failed") or _holds(conditions, "FailureTarget"):
        return _failed(conditions, pods)
    state, reason = _unfinished(job, conditions, pods)
    return JobStatus(state=state, reason=_short(reason))


def _finished(verdict: DistillationVerdict | None, pods: Sequence[Mapping[str, Any]]) -> JobStatus:
    """Return the status of a Job whose pod ended with 0, or wrote a verdict already."""
    if verdict is None:
        message = _last_message(pods[-1]) if pods else "its pods are gone"
        reason = f"the Job completed without a verdict: {message or 'its termination message is empty'}"
        return JobStatus(state=JobState.FAILED, reason=_short(reason), completed=True)
    reason = _short("; ".join(verdict.reasons))
    return JobStatus(state=JobState.FINISHED, reason=reason, verdict=verdict, completed=True)


def _failed(conditions: Mapping[str, Mapping[str, Any]], pods: Sequence[Mapping[str, Any]]) -> JobStatus:
    """Return the status of a Job that failed, with the words of the controller and of the last pod."""
    names = ("Failed", "FailureTarget")
    condition = next(conditions[name] for name in names if _holds(conditions, name))
    message = str(condition.get("message") or condition.get("reason") or "")
    if condition.get("reason") == "DeadlineExceeded":
        return JobStatus(state=JobState.DEADLINE, reason=_short(message))
    last = pods[-1] if pods else None
    words = [message, _pod_failure(last) if last else ""]
    state = JobState.OUT_OF_MEMORY if last and _is_out_of_memory(last) else JobState.FAILED
    return JobStatus(state=state, reason=_short("; ".join(filter(None, words))))


def _unfinished(
    job: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]], pods: Sequence[Mapping[str, Any]]
) -> tuple[JobState, str]:
    """Return the state of a Job that neither completed nor failed, and the reason."""
    if (job.get("spec") or {}).get("suspend") or _holds(conditions, "Suspended"):
        return JobState.SUSPENDED, str(conditions.get("Suspended", {}).get("message") or "the Job waits in its queue")
    if not pods:
        return JobState.PENDING, ""
    pod = pods[-1]
    phase = (pod.get("status") or {}).get("phase")
    disruption = _conditions(pod).get("DisruptionTarget", {})
    if disruption.get("status") == "True":
        return JobState.PREEMPTED, _words(disruption)
    if phase == "Failed":
        return JobState.RETRYING, _pod_failure(pod)
    scheduled = _conditions(pod).get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return JobState.UNSCHEDULABLE, _words(scheduled)
    if phase in ("Running", "Succeeded"):
        return JobState.RUNNING, ""
    return JobState.PENDING, next(_waiting_reasons(pod), "")


def _verdict(pod: Mapping[str, Any]) -> DistillationVerdict | None:
    """Return the verdict in the termination message of a pod that ended with 0."""
    ended = _terminated(pod, JOB_CONTAINER)
    return read_message(str(ended.get("message") or ""), DistillationVerdict) if ended.get("exitCode") == 0 else None


def _pod_failure(pod: Mapping[str, Any]) -> str:
    """Return why a pod failed: the kubelet's words, the container's exit, and the last line of its message."""
    status = pod.get("status") or {}
    words = [_words(status)]
    for container in _ended_containers(pod):
        ended = container["state"]["terminated"]
        if ended.get("exitCode"):
            words.append(f"{container.get('name')}: {ended.get('reason') or 'Error'}, exit code {ended['exitCode']}")
            words.append(last_line(str(ended.get("message") or "")))
    return "; ".join(filter(None, words))


def _is_out_of_memory(pod: Mapping[str, Any]) -> bool:
    """Return whether the kernel killed a container for memory, or the node evicted the pod for it."""
    killed = any(one["state"]["terminated"].get("reason") == _OUT_OF_MEMORY for one in _ended_containers(pod))
    status = pod.get("status") or {}
    return killed or (status.get("reason") == "Evicted" and "memory" in str(status.get("message") or ""))


def _has_ended(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _waiting_reasons(pod: Mapping[str, Any]) -> Iterator[str]:
    """Yield why containers wait, other than for a normal start: an image or a volume that cannot be had."""
    for container in _containers(pod):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in _STARTING:
            yield _words(waiting)


def _last_message(pod: Mapping[str, Any]) -> str:
    return last_line(str(_terminated(pod, JOB_CONTAINER).get("message") or ""))


def _terminated(pod: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return how a container ended; empty if it has not."""
    terminations = (one["state"]["terminated"] for one in _ended_containers(pod) if one.get("name") == name)
    return next(terminations, {})


def _ended_containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [one for one in _containers(pod) if (one.get("state") or {}).get("terminated")]


def _containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the statuses of all containers, of init containers first."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _conditions(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {one["type"]: one for one in (manifest.get("status") or {}).get("conditions") or []}


def _holds(conditions: Mapping[str, Mapping[str, Any]], name: str) -> bool:
    return conditions.get(name, {}).get("status") == "True"


def _created(pod: Mapping[str, Any]) -> tuple[str, str]:
    """Return the key of the order of creation; times of the API server sort as text."""
    meta = pod.get("metadata") or {}
    return str(meta.get("creationTimestamp") or ""), str(meta.get("name") or "")


def _words(status: Mapping[str, Any]) -> str:
    """Return reason and message of a status or a condition."""
    return ": ".join(str(status[key]) for key in ("reason", "message") if status.get(key))


def _short(text: str) -> str:
    return " ".join(text.split())[:MAX_REASON]
