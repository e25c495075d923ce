"""Storage of training runs in pods: a claim, or a bucket with a folder of the pod for what a run needs meanwhile."""

from __future__ import annotations

from typing import Any

from specdecode_operator.api.v1alpha1 import Spec
from specdecode_operator.drafts.run_places import run_folder
from specdecode_operator.manifests.volumes import CLAIMS_DIR, claim_volume, secret_variable
from specdecode_operator.state.draft_record import RunRecord
from specdecode_operator.types import Deployment

SCRATCH, SCRATCH_DIR = "scratch", "/var/lib/specdecode/run"
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_TOKEN = "AWS_SESSION_TOKEN"


def run_volume(deployment: Deployment, run: RunRecord) -> dict[str, Any]:
    """Return the volume that a run writes to."""
    if run.claim:
        return {"name": claim_volume(run.claim), "persistentVolumeClaim": {"claimName": run.claim}}
    s3 = deployment.spec.distillation.storage.s3
    return {"name": SCRATCH, "emptyDir": {"sizeLimit": str(s3.scratch)} if s3 is not None else {}}


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
    s3 = spec.distillation.storage.s3
    if s3 is None:
        return []
    made: list[dict[str, Any]] = [{"name": "AWS_REGION", "value": s3.region}]
    if s3.endpoint:
        made.append({"name": "AWS_ENDPOINT_URL_S3", "value": s3.endpoint})
    keys = [secret_variable(key, s3.secret, key) for key in _KEYS]
    return [*made, *keys, secret_variable(_TOKEN, s3.secret, _TOKEN, optional=True)]
