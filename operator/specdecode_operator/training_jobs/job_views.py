"""Conversion of Jobs and their pods to the records that decisions use. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdecode_operator.drafts.job_status import JobState, job_status
from specdecode_operator.kube.children import controller_of
from specdecode_operator.manifests import RUN_LABEL
from specdecode_operator.times import seconds_of_timestamp
from specdecode_operator.types import TrainingJob


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
