"""Children of deployments: informer caches of them, pods, workloads and Jobs as records, and the writes of Jobs."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pydantic import ValidationError

from specdecode_operator import manifests
from specdecode_operator.api.draft import SpecDecodeDraft
from specdecode_operator.api.v1alpha1 import GROUP, Spec, Status
from specdecode_operator.drafts.job_status import JobState, job_status, last_line, read_message
from specdecode_operator.errors import ClusterError, Conflict, SpecError
from specdecode_operator.kube.apply import ChildRecord, controller_of, project_child
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.informer import Informer
from specdecode_operator.kube.kinds import APPLIED, CONFIG_MAPS, DRAFTS, EVENTS, JOBS, PODS, WORKLOADS, Child
from specdecode_operator.manifests import ROLE_LABEL, RUN_LABEL, Role
from specdecode_operator.times import back_off, seconds_of_timestamp
from specdecode_operator.types import Deployment, Key, Manifest, Observation, TrainingJob, Worker, Workload
from specdecode_worker.contract import CheckVerdict, Revisions
from specdecode_worker.contract.demand import HeldRequests, read_demand

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
            verdicts = (read_message(message, CheckVerdict) for message in _messages(container))
            return next(filter(None, verdicts), None)
    return None


def revisions_of(pod_status: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the commits of the models that a pod's `pull` fetched, by URI. They are validated, as a verdict is."""
    read = read_message(str(pull_of(pod_status).get("message") or ""), Revisions)
    return {sys.intern(uri): sys.intern(commit) for uri, commit in read.revisions.items()} if read else {}


def pull_of(pod_status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the termination of a pod's `pull`; empty until it has ended well."""
    for container in pod_status.get("initContainerStatuses") or []:
        ended: Mapping[str, Any] = (container.get("state") or {}).get("terminated") or {}
        if container.get("name") == PULL_CONTAINER and ended.get("exitCode") == 0:
            return ended
    return {}


def last_words(message: str) -> str:
    """Return why a container ended, in one line: the problem of a verdict, or else the last line of the message."""
    verdict = read_message(message, CheckVerdict)
    if verdict:
        return (verdict.problem if not verdict.fits else verdict.draft_problem or "").strip()
    return last_line(message)


def _messages(container: Mapping[str, Any]) -> Iterator[str]:
    """Yield the messages of the present and the previous termination."""
    for when in ("state", "lastState"):
        ended = (container.get(when) or {}).get("terminated") or {}
        if ended.get("message"):
            yield str(ended["message"])


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


# Conversion of Jobs and their pods to the records that decisions use. Pure.


def job_view(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a Job or of its pod that its state is read from, without templates and containers."""
    fields = ("name", "uid", "labels", "ownerReferences", "creationTimestamp", "deletionTimestamp")
    metadata = {name: manifest["metadata"][name] for name in fields if name in manifest["metadata"]}
    suspend = (manifest.get("spec") or {}).get("suspend")
    return {"metadata": metadata, "spec": {"suspend": suspend}, "status": manifest.get("status") or {}}


def job_of(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> TrainingJob:
    """Return the record of a Job.

    Args:
        job: View of the Job.
        pods: Views of the pods of all Jobs of its deployment.
    """
    metadata = job["metadata"]
    mine = [pod for pod in pods if (controller_of(pod["metadata"]) or {}).get("uid") == metadata["uid"]]
    status = job_status(job, mine)
    is_silent = status.state is JobState.PENDING and not status.reason
    waiting = next((pod for pod in mine if is_silent and _is_on_a_node(pod)), None)
    created = waiting["metadata"].get("creationTimestamp") if waiting else None
    return TrainingJob(
        name=metadata["name"],
        uid=metadata["uid"],
        run=(metadata.get("labels") or {}).get(RUN_LABEL, ""),
        owner_uid=(controller_of(metadata) or {}).get("uid", ""),
        deleting="deletionTimestamp" in metadata,
        status=status,
        waiting_pod=waiting["metadata"]["uid"] if waiting else "",
        waiting_since=seconds_of_timestamp(created) if created else 0.0,
    )


def _is_on_a_node(pod: Mapping[str, Any]) -> bool:
    status = pod["status"]
    conditions = {one["type"]: one["status"] for one in status.get("conditions") or []}
    return status.get("phase") == "Pending" and conditions.get("PodScheduled") == "True"


# Creation and deletion of training Jobs. A Job is created once and never applied again, because Kueue changes it.

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 2.0, 120.0
"""Pause after a refused creation; it doubles from refusal to refusal."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Latest refused creation of a Job."""

    name: str
    """Name of the Job."""
    message: str
    attempts: int
    retry_at: float


class JobWriter:
    """Training Jobs of all deployments. Every call may be repeated."""

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._refused: dict[Key, Refusal] = {}
        """By key of the deployment, which wants one Job at a time."""

    async def carry_out(self, key: Key, wanted: Manifest | None, ended: Iterable[TrainingJob]) -> str:
        """Create the wanted Job and delete those that ended.

        Args:
            key: Key of the deployment.
            wanted: Manifest of the Job to create; None if none is due.
            ended: Jobs to delete with their pods.

        Returns:
            The reason why the Job could not be created; empty if it could, or none is due.

        Raises:
            NotLeader: This process may not write.
        """
        for job in ended:
            try:
                await self._client.delete(JOBS, key[0], job.name, uid=job.uid)
                log.info("%s/%s: deleted Job %s", *key, job.name)
            except Conflict:
                log.info("%s/%s: Job %s was replaced meanwhile", *key, job.name)
            except ClusterError as error:
                log.warning("%s/%s: %s", *key, error)
        name = wanted["metadata"]["name"] if wanted is not None else ""
        refused = self._refused.get(key)
        if refused is not None and refused.name != name:
            del self._refused[key]
            refused = None
        if wanted is None:
            return ""
        if refused is not None and self._clock() < refused.retry_at:
            return refused.message
        problem = await self._create(wanted)
        if not problem:
            self._refused.pop(key, None)
            return ""
        attempts = refused.attempts + 1 if refused else 1
        pause = back_off(attempts, first=FIRST_RETRY_SECONDS, most=MAX_RETRY_SECONDS)
        self._refused[key] = Refusal(name, problem, attempts, self._clock() + pause)
        return problem

    def forget(self, key: Key) -> None:
        """Forget the refusal of a deployment that was deleted."""
        self._refused.pop(key, None)

    async def _create(self, wanted: Manifest) -> str:
        metadata = wanted["metadata"]
        try:
            try:
                await self._client.create(JOBS, wanted)
            except Conflict:
                return self._owned_by_another(
                    await self._client.get(JOBS, metadata["namespace"], metadata["name"]), wanted
                )
        except ClusterError as error:
            return error.sentence
        log.info("created Job %s/%s", metadata["namespace"], metadata["name"])
        return ""

    def _owned_by_another(self, existing: Manifest | None, wanted: Manifest) -> str:
        """Return why a Job that has the name already is not the wanted one; empty if it is."""
        owner = (controller_of(existing["metadata"]) or {}).get("uid") if existing else None
        if existing is None or owner == (controller_of(wanted["metadata"]) or {}).get("uid"):
            return ""
        return f'Job "{wanted["metadata"]["name"]}" exists already and is not of this deployment; delete it'


# Informer caches of all objects that a reconcile reads: workloads, pods, and the metadata of the other children.

CHILD_LABELS = f"{GROUP}/name"
"""Label selector of all children: each has the label with the name of its deployment."""
POD_LABELS = f"{GROUP}/name,{GROUP}/role in (worker,prefill)"
"""Label selector of the pods of workers and prefill workers."""
JOB_LABELS = f"{GROUP}/name,{GROUP}/role=job"
"""Label selector of training Jobs and of their pods."""
JOB_PODS = "JobPod"
"""Name of the informer of the pods of Jobs."""
WORKLOAD_LABELS = f"{GROUP}/name,{GROUP}/role in (worker,prefill,router)"
"""Label selector of the Deployments of workers, prefill workers and routers."""
ROUTER_LABELS = f"{GROUP}/name,{GROUP}/role=router"
"""Label selector of the ConfigMaps in which routers report held requests."""
DEMAND = "Demand"
"""Name of the informer of these ConfigMaps, with their data."""
METADATA_KINDS = tuple(kind for kind in APPLIED.values() if kind != WORKLOADS)
"""Kinds of which only the metadata is cached."""


class WorkloadRecord(NamedTuple):
    """Cached child Deployment: its ownership, and the state of its rollout."""

    child: ChildRecord
    workload: Workload
    role: str
    """Role of its pods."""


class Caches:
    """Informers of all kinds. They run on every replica of the operator, so that caches of a new leader are full."""

    def __init__(
        self,
        client: KubeClient,
        namespaces: Sequence[str],
        on_change: Callable[[Key], None],
        on_child: Callable[[Key], None],
    ) -> None:
        """Prepare the informers.

        Args:
            client: Client of the API server.
            namespaces: Namespaces to watch; none of them means all.
            on_change: Called with the key of a deployment whose pods or workload changed.
            on_child: Called with the key of a deployment of which another child changed.
        """

        def informers(kind: Any, labels: str, project: Callable[..., Any], *, metadata_only: bool = False) -> Any:
            return Informer(
                client,
                kind,
                namespaces,
                labels=labels,
                project=project,
                metadata_only=metadata_only,
                on_change=on_child if metadata_only else on_change,
            )

        self._workloads: Informer[WorkloadRecord] = informers(WORKLOADS, WORKLOAD_LABELS, _project_workload)
        self._pods: Informer[Worker] = informers(PODS, POD_LABELS, worker_of)
        self._demand: Informer[Mapping[str, HeldRequests]] = informers(CONFIG_MAPS, ROUTER_LABELS, _project_demand)
        self._jobs: Informer[Mapping[str, Any]] = informers(JOBS, JOB_LABELS, job_view)
        self._job_pods: Informer[Mapping[str, Any]] = informers(PODS, JOB_LABELS, job_view)
        self._drafts: Informer[SpecDecodeDraft] = informers(DRAFTS, "", _project_draft)
        self._children: Mapping[str, Informer[ChildRecord]] = {
            kind.kind: informers(kind, CHILD_LABELS, project_child(kind), metadata_only=True) for kind in METADATA_KINDS
        }
        self.informers: Mapping[str, Informer[Any]] = {
            WORKLOADS.kind: self._workloads,
            PODS.kind: self._pods,
            DEMAND: self._demand,
            JOBS.kind: self._jobs,
            JOB_PODS: self._job_pods,
            DRAFTS.kind: self._drafts,
            **self._children,
        }

    async def run(self) -> None:
        """List and watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in self.informers.values():
                group.create_task(informer.run())

    async def wait_synced(self) -> None:
        """Wait until all objects of every kind were listed.

        A refused list of Jobs is not waited for: an operator whose role is older than itself serves without training.
        """
        for kind, informer in self.informers.items():
            await (informer.answered if kind == JOBS.kind else informer.synced).wait()

    def problem(self) -> str:
        """Return which lists ``wait_synced`` still waits for, and why; empty if for none."""
        problems = {kind: informer.problem for kind, informer in self.informers.items()}
        if self._jobs.answered.is_set():
            problems[JOBS.kind] = ""
        return "; ".join(f"list of {kind}: {problem}" for kind, problem in problems.items() if problem)

    def contact_age(self, kind: str) -> float:
        """Return the seconds since the API server last sent data on the watch of a kind."""
        return time.monotonic() - self.informers[kind].last_contact

    def workers(self, key: Key, role: Role = Role.worker) -> tuple[Worker, ...]:
        """Return the worker pods of a deployment with this role, in the order of their names."""
        return tuple(sorted((one for one in self._pods.of(key) if one.role == role), key=lambda worker: worker.name))

    def workload(self, key: Key, role: Role = Role.worker) -> Workload | None:
        """Return the Deployment of the workers, or of those with another role, without its pod template."""
        return next((record.workload for record in self._workloads.of(key) if record.role == role), None)

    def demand(self, key: Key) -> Mapping[str, HeldRequests]:
        """Return the requests that routers reported as held, by router."""
        return next(iter(self._demand.of(key)), {})

    def drafts(self, key: Key) -> tuple[SpecDecodeDraft, ...]:
        """Return the SpecDecodeDrafts of a deployment in the order of their names."""
        return self._drafts.of(key)

    def note_draft(self, manifest: dict[str, Any]) -> None:
        """Take a SpecDecodeDraft that a write returned, before its watch event arrives."""
        self._drafts.note(manifest)

    def jobs(self, key: Key) -> tuple[TrainingJob, ...]:
        """Return the training Jobs with the deployment's name in their label, in the order of their names."""
        jobs = self._jobs.of(key)
        pods = self._job_pods.of(key) if jobs else ()
        return tuple(job_of(job, pods) for job in jobs)

    def jobs_problem(self, key: Key) -> str:
        """Return why the Jobs of a deployment are not known; empty if they are."""
        return self._jobs.refusal(key[0])

    def record(self, child: Child) -> ChildRecord | None:
        """Return the ownership of a child, or None if the cache has no such object."""
        kind, namespace, name = child
        if kind == WORKLOADS.kind:
            record = self._workloads.get(namespace, name)
            return record.child if record else None
        return self._children[kind].get(namespace, name) if kind in self._children else None


def _project_workload(deployment: dict[str, Any]) -> WorkloadRecord:
    # 1000 pod templates would be most of the memory. Only a loss of state needs one; it is then read from the server.
    role = deployment["metadata"]["labels"][ROLE_LABEL]
    workload = replace(workload_of(deployment), template={})
    return WorkloadRecord(project_child(WORKLOADS)(deployment), workload, sys.intern(role))


def _project_draft(manifest: dict[str, Any]) -> SpecDecodeDraft:
    metadata = {name: value for name, value in manifest["metadata"].items() if name != "managedFields"}
    return SpecDecodeDraft.model_validate({**manifest, "metadata": metadata})


def _project_demand(config_map: dict[str, Any]) -> Mapping[str, HeldRequests]:
    return read_demand(config_map.get("data") or {})
