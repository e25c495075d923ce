"""Job that deletes the folder of a training run that ended without a verdict, with the captured text in it.

It runs where the training ran and with the same user, so that it can mount the claim and write to it, and needs no
device. Containers and volumes of the user's template are left out: they are those of the training.
"""

from __future__ import annotations

from specdecode_operator.api.v1alpha1 import object_in
from specdecode_operator.drafts.run_places import deletion_id, run_folder
from specdecode_operator.manifests.distillation_job import (
    BACKOFF_LIMIT,
    QUEUE_LABEL,
    job_container,
    job_label,
    job_labels,
    job_pod,
    job_template,
    without_containers,
)
from specdecode_operator.manifests.identity import metadata
from specdecode_operator.manifests.volumes import CLAIMS_DIR, claim_volume
from specdecode_operator.state.draft_record import RunRecord
from specdecode_operator.types import Defaults, Deployment, Manifest
from specdecode_worker.contract.distillation import JOB_CONTAINER

DEADLINE_SECONDS = 1800
"""Time for all pods of the Job, with pulling the image."""
_RESOURCES = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}}


def deletion_job_name(deployment: str, run: str) -> str:
    """Return the name of the Job."""
    return job_label(f"{deployment}-delete-{run}")


def deletion_job(deployment: Deployment, run: RunRecord, defaults: Defaults) -> Manifest:
    """Return the Job. It has no queue: a queue that is full must not keep captured text."""
    made = metadata(deployment, deletion_job_name(deployment.name, run.id))
    labels = job_labels(made["labels"], deployment, deletion_id(run.id))
    folder = f"{CLAIMS_DIR}/{run.claim}"
    container = {
        **job_container(deployment, defaults, JOB_CONTAINER),
        "command": ["specdecode-worker", "capture", "prune", f"{folder}/{run_folder(deployment.name, run.id)}"],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": _RESOURCES,
        "volumeMounts": [{"name": claim_volume(run.claim), "mountPath": folder}],
    }
    volume = {"name": claim_volume(run.claim), "persistentVolumeClaim": {"claimName": run.claim}}
    pod = {**job_pod(deployment, defaults), "containers": [container], "volumes": [volume]}
    template = deployment.spec.distillation.job_template
    given = object_in(object_in(template, "metadata"), "labels")
    users = {
        "metadata": {
            **object_in(template, "metadata"),
            "labels": {name: value for name, value in given.items() if name != QUEUE_LABEL},
        },
        "spec": without_containers(object_in(template, "spec")),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**made, "labels": labels},
        "spec": {
            "backoffLimit": BACKOFF_LIMIT,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "completions": 1,
            "parallelism": 1,
            "template": job_template(pod, labels, users, defaults),
        },
    }
