"""Everything that one reconcile needs to know: the resource, its children, its pods and their reports."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from specdecode_operator import manifests
from specdecode_operator.api.v1alpha1 import KIND, PAUSED_ANNOTATION, PIN_ANNOTATION, Spec, Status
from specdecode_operator.errors import Conflict, SpecError, Unavailable, WorkerError
from specdecode_operator.kube.client import DEPLOYMENTS, PODS, SECRETS, WORKLOADS, KubeClient
from specdecode_operator.kube.pod_cache import PodCache
from specdecode_operator.kube.termination_message import last_words, verdict_of
from specdecode_operator.state.session import Baseline
from specdecode_operator.state.store import StateStore
from specdecode_operator.telemetry.deltas import went_backwards
from specdecode_operator.telemetry.worker_client import Unchanged, WorkerClient
from specdecode_operator.types import Deployment, Observation, Worker, Workload
from specdecode_worker.contract import Report


async def find(cluster: KubeClient, namespace: str, name: str) -> Mapping[str, Any] | None:
    """The resource as the API server has it; None when it is gone or going."""
    found = await cluster.get(DEPLOYMENTS, namespace, name)
    return None if found is None or "deletionTimestamp" in found["metadata"] else found


def deployment_of(resource: Mapping[str, Any]) -> Deployment:
    """Raises SpecError when the spec does not read: the CRD is of another version than this operator."""
    metadata = resource["metadata"]
    try:
        spec = Spec.model_validate(resource["spec"])
    except ValidationError as error:
        first = error.errors()[0]
        raise SpecError(f"spec.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    annotations = metadata.get("annotations") or {}
    return Deployment(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=spec,
        status=status_of_resource(resource),
        paused=annotations.get(PAUSED_ANNOTATION, "false") != "false",
        pin=annotations.get(PIN_ANNOTATION, ""),
    )


def status_of_resource(resource: Mapping[str, Any]) -> Status:
    """The status as it stands; a blank one when another version wrote it."""
    try:
        return Status.model_validate(resource.get("status") or {})
    except ValidationError:
        return Status()


async def observe(
    deployment: Deployment,
    cluster: KubeClient,
    workers: WorkerClient,
    memories: StateStore,
    pods: PodCache | None = None,
) -> Observation:
    """Reads the children, then all reports at once. A worker without a report carries the reason. ``pods`` spares the
    list of those that nothing happened to."""
    # The memory first: it says what was applied, so that a workload which stands is known to stand.
    memory = await memories.load(deployment)
    workload, found, token = await asyncio.gather(
        cluster.get(WORKLOADS, deployment.namespace, manifests.worker_name(deployment.name)),
        _workers(deployment, cluster, pods or PodCache()),
        _admin_token(deployment, cluster),
    )
    asked = (_reported(worker, workers, token, memory.baselines.get(worker.uid)) for worker in found)
    return Observation(
        workload=workload_of(workload) if workload else None,
        workers=tuple(await asyncio.gather(*asked)),
        session=memory,
        token=token,
    )


async def _workers(deployment: Deployment, cluster: KubeClient, pods: PodCache) -> tuple[Worker, ...]:
    known = pods.known(deployment.key)
    if known is not None:
        return known
    labels = ",".join(f"{key}={value}" for key, value in manifests.selector(deployment.name).items())
    listed = await cluster.list(PODS, deployment.namespace, labels=labels)
    found = tuple(worker_of(pod) for pod in listed["items"])
    pods.listed(deployment.key, found)
    return found


async def _admin_token(deployment: Deployment, cluster: KubeClient) -> str:
    """The token of the admin ports; makes the Secret when there is none yet."""
    name = manifests.admin_secret_name(deployment.name)
    found = await cluster.get(SECRETS, deployment.namespace, name)
    if found is None and deployment.paused:
        return ""
    if found is None:
        token = secrets.token_urlsafe(32)
        try:
            await cluster.create(SECRETS, manifests.admin_secret(deployment, token))
            return token
        except Conflict:
            found = await cluster.get(SECRETS, deployment.namespace, name)
    if found and _is_of_a_predecessor(found, deployment):
        raise Unavailable(f"Secret {name} of a deleted namesake is still being collected")
    data = (found or {}).get("data") or {}
    if manifests.ADMIN_TOKEN_KEY not in data:
        raise SpecError(f"Secret {name} has no key {manifests.ADMIN_TOKEN_KEY}; delete it and it is made anew")
    return base64.b64decode(data[manifests.ADMIN_TOKEN_KEY]).decode()


def _is_of_a_predecessor(secret: Mapping[str, Any], deployment: Deployment) -> bool:
    """Its token would be gone in a moment, and with it the way to pods that started with it."""
    owners = [owner for owner in secret["metadata"].get("ownerReferences", []) if owner["kind"] == KIND]
    return bool(owners) and all(owner["uid"] != deployment.uid for owner in owners)


async def _reported(worker: Worker, workers: WorkerClient, token: str, known: Baseline | None) -> Worker:
    if worker.leaving or worker.address is None:
        return worker
    try:
        answer = await workers.report(worker.address, token, known.tag if known else "")
    except WorkerError as error:
        return replace(worker, report_problem=str(error))
    if not isinstance(answer, Unchanged):
        return believed(replace(worker, report=answer.report, report_tag=answer.tag), known.report if known else None)
    assert known is not None, "only who knows a report is told that it is unchanged"
    return replace(worker, report=known.at(answer.clock_seconds).report, report_tag=known.tag)


def believed(worker: Worker, before: Report | None) -> Worker:
    """The worker without its report where a counter fell within one boot: counters never do, so none of it is true.

    ``before`` stays what the worker is held against, until its counters have passed it or it starts anew.
    """
    report = worker.report
    if report is None or before is None or report.boot_id != before.boot_id:
        return worker
    name = went_backwards(before, report)
    if name is None:
        return worker
    problem = f"{name}: fell from {getattr(before, name):g} to {getattr(report, name):g} within one boot"
    return replace(worker, report=None, report_problem=problem)


def worker_of(pod: Mapping[str, Any]) -> Worker:
    """A pod as the operator sees it."""
    status = pod.get("status", {})
    conditions = {found["type"]: found["status"] for found in status.get("conditions", [])}
    over = status.get("phase") in ("Succeeded", "Failed")
    ready = conditions.get("Ready") == "True"
    return Worker(
        name=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        address=status.get("podIP"),
        ready=ready,
        leaving=over or "deletionTimestamp" in pod["metadata"],
        trouble=_trouble(status),
        deletion_cost=_deletion_cost(pod),
        startup_seconds=_startup(pod),
        # One that serves by now has proven its last words wrong.
        verdict=None if ready else verdict_of(status),
    )


def _deletion_cost(pod: Mapping[str, Any]) -> int | None:
    """As annotated; None when it is not, or by somebody who wrote no number."""
    text = (pod["metadata"].get("annotations") or {}).get(manifests.DELETION_COST_ANNOTATION, "")
    return int(text) if text.lstrip("-").isdecimal() else None


def _startup(pod: Mapping[str, Any]) -> float | None:
    """Seconds from its making until it was ready; None when it is not."""
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == "Ready" and condition["status"] == "True":
            times = pod["metadata"].get("creationTimestamp"), condition.get("lastTransitionTime")
            if all(times):
                made, ready = (datetime.fromisoformat(str(time).replace("Z", "+00:00")) for time in times)
                return max(0.0, (ready - made).total_seconds())
    return None


def _trouble(status: Mapping[str, Any]) -> str | None:
    """Why the pod does not start, in the kubelet's or the scheduler's words."""
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            ended = container.get("lastState", {}).get("terminated", {}).get("message", "")
            words = last_words(ended) or waiting.get("message", "")
            return f"{container['name']}: {waiting['reason']}: {words}".strip(": ")[:500]
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}"[:500]
    return None


def workload_of(found: Mapping[str, Any]) -> Workload:
    """The child Deployment as the operator sees it."""
    status = found.get("status", {})
    conditions = {item["type"]: item for item in status.get("conditions", [])}
    progressing = conditions.get("Progressing", {})
    return Workload(
        generation=found["metadata"]["generation"],
        observed_generation=status.get("observedGeneration", 0),
        wanted=found["spec"].get("replicas", 1),
        replicas=status.get("replicas", 0),
        updated=status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        available=status.get("availableReplicas", 0),
        stalled=progressing.get("message") if progressing.get("status") == "False" else None,
        template=found["spec"]["template"],
        spec_hash=(found["metadata"].get("annotations") or {}).get(manifests.SPEC_HASH_ANNOTATION, ""),
    )
