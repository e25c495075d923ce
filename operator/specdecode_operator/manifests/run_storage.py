"""Storage of training runs in pods: a claim, or a bucket with a folder of the pod for what a run needs meanwhile."""

from __future__ import annotations

from typing import Any

from specdecode_operator.api.v1alpha1 import AWS_REGION, Spec
from specdecode_operator.drafts.run_places import run_folder
from specdecode_operator.manifests.volumes import CLAIMS_DIR, claim_volume, secret_variable
from specdecode_operator.state.draft_record import RunRecord

SCRATCH, SCRATCH_DIR = "scratch", "/var/lib/specdecode/run"
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_TOKEN = "AWS_SESSION_TOKEN"
SCRATCH_LIMIT = "64Gi"
"""Size of a run's data and checkpoints on its node. A pod beyond is evicted, and a new one begins anew."""


def run_volume(run: RunRecord) -> dict[str, Any]:
    """Return the volume that a run writes to."""
    if run.claim:
        return {"name": claim_volume(run.claim), "persistentVolumeClaim": {"claimName": run.claim}}
    return {"name": SCRATCH, "emptyDir": {"sizeLimit": SCRATCH_LIMIT}}


def run_mount(run: RunRecord) -> dict[str, Any]:
    """Return the mount of that volume."""
    if run.claim:
        return {"name": claim_volume(run.claim), "mountPath": f"{CLAIMS_DIR}/{run.claim}"}
    return {"name": SCRATCH, "mountPath": SCRATCH_DIR}


def run_out(deployment: str, run: RunRecord) -> str:
    """Return the folder of a run in its pod."""
    return f"{run_mount(run)['mountPath']}/{run_folder(deployment, run.id)}"


def bucket_environment(spec: Spec) -> list[dict[str, Any]]:
    """Return the variables for the bucket of drafts, under the names of AWS's own tools; none without a bucket."""
    storage = spec.distillation.storage
    if storage is None or storage.secret_ref is None:
        return []
    made: list[dict[str, Any]] = [{"name": "AWS_REGION", "value": storage.region or AWS_REGION}]
    if storage.endpoint:
        made.append({"name": "AWS_ENDPOINT_URL_S3", "value": storage.endpoint})
    secret = storage.secret_ref.name
    keys = [secret_variable(key, secret, key) for key in _KEYS]
    return [*made, *keys, secret_variable(_TOKEN, secret, _TOKEN, optional=True)]
