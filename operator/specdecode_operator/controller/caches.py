"""Informer caches of all objects that a reconcile reads: workloads, pods, and the metadata of the other children."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from specdecode_operator.api.draft import SpecDecodeDraft
from specdecode_operator.api.v1alpha1 import GROUP
from specdecode_operator.controller.pods import worker_of, workload_of
from specdecode_operator.controller.training_jobs import job_of, job_view
from specdecode_operator.kube.apply import ChildRecord, project_child
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.informer import Informer
from specdecode_operator.kube.kinds import APPLIED, CONFIG_MAPS, DRAFTS, JOBS, PODS, WORKLOADS, Child
from specdecode_operator.manifests import ROLE_LABEL, Role
from specdecode_operator.types import Key, TrainingJob, Worker, Workload
from specdecode_worker.contract.demand import HeldRequests, read_demand

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

        def informers(kind: Any, labels: str, project: Callable[[dict[str, Any]], Any], *, metadata_only: bool) -> Any:
            return Informer(
                client,
                kind,
                namespaces,
                labels=labels,
                project=project,
                metadata_only=metadata_only,
                on_change=on_child if metadata_only else on_change,
            )

        self._workloads: Informer[WorkloadRecord] = informers(
            WORKLOADS, WORKLOAD_LABELS, _project_workload, metadata_only=False
        )
        self._pods: Informer[Worker] = informers(PODS, POD_LABELS, worker_of, metadata_only=False)
        self._demand: Informer[Mapping[str, HeldRequests]] = informers(
            CONFIG_MAPS, ROUTER_LABELS, _project_demand, metadata_only=False
        )
        self._jobs: Informer[Mapping[str, Any]] = informers(JOBS, JOB_LABELS, job_view, metadata_only=False)
        self._job_pods: Informer[Mapping[str, Any]] = informers(PODS, JOB_LABELS, job_view, metadata_only=False)
        self._drafts: Informer[SpecDecodeDraft] = informers(DRAFTS, "", _project_draft, metadata_only=False)
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
