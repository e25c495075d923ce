"""Training Jobs: what is cached of them, their creation and deletion."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdecode_operator.drafts.job_status import JobState, job_status
from specdecode_operator.errors import ClusterError, Conflict
from specdecode_operator.kube.apply import controller_of
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import JOBS
from specdecode_operator.manifests import RUN_LABEL
from specdecode_operator.times import back_off, seconds_of_timestamp
from specdecode_operator.types import Key, Manifest, TrainingJob

log = logging.getLogger(__name__)

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
