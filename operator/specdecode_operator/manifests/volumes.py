"""Volumes of a worker pod and where they are mounted."""

from __future__ import annotations

from typing import Any

from specdecode_operator.api.v1alpha1 import Spec
from specdecode_operator.manifests.config import CACHE_DIR, model_uris
from specdecode_operator.manifests.identity import PLAN_KEY, plan_name

PLAN_DIR = "/etc/specdecode/plan"
PLAN_PATH = f"{PLAN_DIR}/{PLAN_KEY}"
CLAIMS_DIR = "/mnt/pvc"


def volumes(spec: Spec, name: str) -> list[dict[str, Any]]:
    claims = [
        {"name": f"claim-{claim}", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        for claim in model_claims(spec)
    ]
    return [
        {"name": "model-cache", **_cache(spec)},
        {"name": "plan", "configMap": {"name": plan_name(name)}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        *claims,
    ]


def model_mounts(spec: Spec) -> list[dict[str, Any]]:
    """What `pull` needs: the cache, a place for temporary files, and claims that models are read from."""
    claims = [
        {"name": f"claim-{claim}", "mountPath": f"{CLAIMS_DIR}/{claim}", "readOnly": True}
        for claim in model_claims(spec)
    ]
    return [{"name": "model-cache", "mountPath": CACHE_DIR}, {"name": "tmp", "mountPath": "/tmp"}, *claims]


def serving_mounts(spec: Spec) -> list[dict[str, Any]]:
    """The plan is mounted as a folder: a file mounted by subPath would never see an update."""
    return [
        *model_mounts(spec),
        {"name": "plan", "mountPath": PLAN_DIR, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]


def model_claims(spec: Spec) -> list[str]:
    """Claims named by ``pvc://claim/path`` URIs, each once."""
    return list(dict.fromkeys(uri[6:].split("/", 1)[0] for uri in model_uris(spec) if uri.startswith("pvc://")))


def _cache(spec: Spec) -> dict[str, Any]:
    cache = spec.storage.model_cache
    if cache.pvc:
        return {"persistentVolumeClaim": {"claimName": cache.pvc}}
    if cache.host_path:
        # Not DirectoryOrCreate: the kubelet would make it root's, and `pull` runs as uid 65532. A missing folder is
        # named in the pod's events.
        return {"hostPath": {"path": cache.host_path, "type": "Directory"}}
    return {"emptyDir": {}}
