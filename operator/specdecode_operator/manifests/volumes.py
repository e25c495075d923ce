"""Volumes of a worker pod, and where they are mounted."""

from __future__ import annotations

import hashlib
import re
from decimal import InvalidOperation
from typing import Any

from specdecode_operator.api.v1alpha1 import Spec, object_in
from specdecode_operator.errors import SpecError
from specdecode_operator.manifests.config import (
    API_KEYS_DIR,
    CACHE_DIR,
    CAPTURES_DIR,
    TLS_DIR,
    TOKENS_DIR,
    model_uris,
    quantity_value,
    unpinned_uris,
)
from specdecode_operator.manifests.identity import PLAN_KEY, REVISIONS_KEY, plan_name, tokens_name
from specdecode_operator.types import Defaults

PLAN_DIR = "/etc/specdecode/plan"
PLAN_PATH = f"{PLAN_DIR}/{PLAN_KEY}"
REVISIONS_PATH = f"{PLAN_DIR}/{REVISIONS_KEY}"
PLAN_MOUNT = {"name": "plan", "mountPath": PLAN_DIR, "readOnly": True}
CLAIMS_DIR = "/mnt/pvc"
COMPILED_DIR = "/var/cache/specdecode-compiled"
"""Folder of compiled kernels, one for each pod. They are loaded without a check of their contents, which no hash can
give, so the folder must not be shared with another pod and is never part of the model cache."""
COMPILED_LIMIT = "4Gi"
"""Size of the compiled kernels of Triton and torch. Some hundred megabytes are usual; a pod beyond is evicted."""
TMP_LIMIT = "2Gi"
"""Size of /tmp, for a socket of the worker and small files of libraries."""
CAPTURES_LIMIT = "3Gi"
"""Size of captured requests. The worker keeps them below 2Gi (`CaptureRules.max_bytes`); the rest is for a segment that
is being written. A pod beyond is evicted."""
SHM_LIMIT = "2Gi"
"""Size of /dev/shm, which is memory of the pod. NCCL needs some hundred megabytes with eight devices."""
SECRET_MODE = 0o440
"""Mode of mounted secrets: only root and the pod's group read them."""
_LABEL = re.compile("[a-z0-9]([-a-z0-9]{0,55}[a-z0-9])?")


def volumes(spec: Spec, name: str, defaults: Defaults) -> list[dict[str, Any]]:
    """Return the volumes of a worker pod of the deployment ``name``."""
    claims = [
        {"name": claim_volume(claim), "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        for claim in model_claims(spec)
    ]
    return [
        {**(spec.model_cache or defaults.model_cache), "name": "model-cache"},
        {"name": "plan", "configMap": {"name": plan_name(name)}},
        *(secret for secret, _ in _secrets(spec, name)),
        {"name": "compiled", "emptyDir": {"sizeLimit": COMPILED_LIMIT}},
        {"name": "captures", "emptyDir": {"sizeLimit": CAPTURES_LIMIT}},
        {"name": "tmp", "emptyDir": {"sizeLimit": TMP_LIMIT}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHM_LIMIT}},
        *claims,
    ]


def cache_limit(spec: Spec, defaults: Defaults) -> int:
    """Return the bytes that a pod's own model cache may hold before the kubelet evicts the pod; 0 without such a limit.

    Raises:
        SpecError: The limit is no quantity.
    """
    limit = object_in(spec.model_cache or defaults.model_cache, "emptyDir").get("sizeLimit")
    try:
        return int(quantity_value(limit)) if limit is not None else 0
    except InvalidOperation:
        raise SpecError(f"modelCache.emptyDir.sizeLimit is {limit!r}; write an amount such as 200Gi") from None


def model_mounts(spec: Spec, *, read_only: bool = False) -> list[dict[str, Any]]:
    """Return the mounts for models: the cache, a place for temporary files, and claims that models are read from.

    With ``read_only`` nothing can be written to the model cache.
    """
    cache = {"name": "model-cache", "mountPath": CACHE_DIR, **({"readOnly": True} if read_only else {})}
    claims = [
        {"name": claim_volume(claim), "mountPath": f"{CLAIMS_DIR}/{claim}", "readOnly": True}
        for claim in model_claims(spec)
    ]
    return [cache, {"name": "tmp", "mountPath": "/tmp"}, *claims]


def pull_mounts(spec: Spec) -> list[dict[str, Any]]:
    """Return the mounts of `pull`: those of the models, and the plan's folder, which has the commits to fetch."""
    return [*model_mounts(spec), *([dict(PLAN_MOUNT)] if unpinned_uris(spec) else [])]


def serving_mounts(spec: Spec, name: str) -> list[dict[str, Any]]:
    """Return the mounts of the worker. Only `pull` writes models, so that a worker cannot change what another serves.

    Plan and secrets are mounted as folders: a file mounted by subPath would never be updated.
    """
    secrets = [
        {"name": secret["name"], "mountPath": folder, "readOnly": True} for secret, folder in _secrets(spec, name)
    ]
    return [
        *model_mounts(spec, read_only=True),
        *torch_mounts(),
        {"name": "captures", "mountPath": CAPTURES_DIR},
        dict(PLAN_MOUNT),
        *secrets,
    ]


def torch_mounts() -> list[dict[str, Any]]:
    """Return the mounts that torch needs: its compiled kernels, and memory that processes share."""
    return [{"name": "compiled", "mountPath": COMPILED_DIR}, {"name": "shm", "mountPath": "/dev/shm"}]


def torch_environment() -> list[dict[str, str]]:
    """Return the variables that place compiled kernels.

    The image's own value of XDG_CACHE_HOME lies in the model cache, which is read-only for workers and may be shared.
    """
    return [
        {"name": "XDG_CACHE_HOME", "value": COMPILED_DIR},
        {"name": "TRITON_CACHE_DIR", "value": f"{COMPILED_DIR}/triton"},
        {"name": "TORCHINDUCTOR_CACHE_DIR", "value": f"{COMPILED_DIR}/inductor"},
    ]


def model_claims(spec: Spec) -> list[str]:
    """Return the claims that models are read from, each once: those of ``pvc://claim/path`` URIs, and of new drafts."""
    named = [uri[6:].split("/", 1)[0] for uri in model_uris(spec) if uri.startswith("pvc://")]
    storage = spec.distillation.storage
    return list(dict.fromkeys([*named, *([storage.claim] if storage and storage.claim else [])]))


def claim_volume(claim: str) -> str:
    """Return the name of a claim's volume: a DNS label, although a claim's name may be longer and have dots."""
    short = claim if _LABEL.fullmatch(claim) else hashlib.sha256(claim.encode()).hexdigest()[:10]
    return f"claim-{short}"


def _secrets(spec: Spec, name: str) -> list[tuple[dict[str, Any], str]]:
    """Return the mounted Secrets as volumes, with their folders."""
    secrets = [(secret_volume("tokens", tokens_name(name)), TOKENS_DIR)]
    if reference := spec.api_keys_secret_ref:
        secrets.append((secret_volume("api-keys", reference.name, reference.key), API_KEYS_DIR))
    if spec.tls_secret_ref:
        secrets.append((secret_volume("tls", spec.tls_secret_ref.name), TLS_DIR))
    return secrets


def secret_volume(volume: str, name: str, key: str | None = None) -> dict[str, Any]:
    """Return the volume of a Secret, or of one of its entries."""
    items = {"items": [{"key": key, "path": key}]} if key else {}
    return {"name": volume, "secret": {"secretName": name, "defaultMode": SECRET_MODE, **items}}


def secret_variable(variable: str, name: str, key: str, *, optional: bool = False) -> dict[str, Any]:
    """Return the environment variable with an entry of a Secret. An ``optional`` entry may be absent."""
    reference = {"name": name, "key": key, **({"optional": True} if optional else {})}
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}
