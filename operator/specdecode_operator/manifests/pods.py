"""Parts of pods: strategic merge of users' templates, security contexts, volumes, and storage of training runs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from decimal import InvalidOperation
from typing import Any

from specdecode_operator.api.v1alpha1 import AWS_REGION, Spec, object_in
from specdecode_operator.drafts.job_status import run_folder
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
from specdecode_operator.manifests.identity import REVISIONS_KEY, plan_name, tokens_name
from specdecode_operator.state.draft_record import RunRecord
from specdecode_operator.state.learned import PLAN_KEY
from specdecode_operator.types import Defaults
from specdecode_worker.contract import Port

# Strategic merge of a user's pod template over the operator's.
#
# Maps are merged by key, and lists by the field that identifies their items in Kubernetes.

MERGE_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"),
    "imagePullSecrets": ("name",),
    "resourceClaims": ("name",),
    "claims": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
"""Lists whose items are merged one by one, with the identifying fields. Other lists of the overlay replace the base."""
_DEFAULTS = {"protocol": "TCP"}
"""Values of identifying fields that an item may leave out."""
_HANDLERS = frozenset({"exec", "httpGet", "tcpSocket", "grpc", "sleep"})
_VARIABLE_SOURCES = frozenset({"fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "fileKeyRef"})
_ONE_OF = {
    "env": frozenset({"value", "valueFrom"}),
    "valueFrom": _VARIABLE_SOURCES,
    "startupProbe": _HANDLERS,
    "readinessProbe": _HANDLERS,
    "livenessProbe": _HANDLERS,
    "postStart": _HANDLERS,
    "preStop": _HANDLERS,
    "resourceClaims": frozenset({"resourceClaimName", "resourceClaimTemplateName"}),
}
"""Fields of which an object may have one, by the field that holds the object or the list of objects. In a volume these
are all fields but its name."""


def merged(base: Mapping[str, Any], overlay: Mapping[str, Any], path: str = "workers.template") -> dict[str, Any]:
    """Return ``overlay`` merged over ``base``; null removes a field.

    Where Kubernetes allows one of several fields, such as the handlers of a probe or the sources of a volume, the
    overlay's field replaces the base's.

    Args:
        base: Part of the operator's template.
        overlay: Part of the user's template.
        path: Place of the overlay in the spec, for errors.

    Raises:
        SpecError: An object or a list of the base would be replaced by a value of another type, or an item of a list
            has no identifying field. The message names the path.
    """
    result = dict(base)
    for key, value in overlay.items():
        place, known = f"{path}.{key}", result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(known, Mapping):
            users = _expect(value, Mapping, place, "an object")
            result[key] = merged(_without_alternatives(known, users, key), users, place)
        elif isinstance(known, list):
            items = _expect(value, list, place, "a list")
            result[key] = _merged_items(known, items, key, place) if key in MERGE_KEYS else items
        elif isinstance(value, list) and key in MERGE_KEYS:
            result[key] = _merged_items([], value, key, place)
        else:
            result[key] = value
    return result


def _without_alternatives(base: Mapping[str, Any], overlay: Mapping[str, Any], holder: str) -> dict[str, Any]:
    """Return ``base`` without the fields that exclude a field of ``overlay``."""
    group = frozenset({*base, *overlay} - {"name"}) if holder == "volumes" else _ONE_OF.get(holder, frozenset())
    given = {key for key in group if overlay.get(key) is not None}
    return {key: value for key, value in base.items() if not given or key not in group or key in given}


def _expect(value: Any, kind: type[Any], path: str, name: str) -> Any:
    if not isinstance(value, kind):
        raise SpecError(f"{path} must be {name}, not {value!r:.60}")
    return value


def _merged_items(base: list[Any], overlay: list[Any], holder: str, path: str) -> list[Any]:
    """Merge lists of objects by their identifying fields. Items of the base keep their order, new ones follow."""
    keys = MERGE_KEYS[holder]
    items = {_identity(item, keys, f"{path}[{index}]"): item for index, item in enumerate(base)}
    for index, item in enumerate(overlay):
        place = f"{path}[{index}]"
        identity = _identity(item, keys, place)
        known = items.get(identity)
        items[identity] = merged(_without_alternatives(known, item, holder), item, place) if known else dict(item)
    return list(items.values())


def _identity(item: Any, keys: tuple[str, ...], path: str) -> tuple[str | int, ...]:
    if not isinstance(item, Mapping):
        raise SpecError(f"{path} must be an object with a {keys[0]}, not {item!r:.60}")
    return tuple(_identifying(item.get(key, _DEFAULTS.get(key)), key, path) for key in keys)


def _identifying(value: Any, key: str, path: str) -> str | int:
    if value is None:
        raise SpecError(f"{path} needs a {key}: items are merged by it")
    if not isinstance(value, str | int):
        raise SpecError(f"{path}.{key} must be a text or a number, not {value!r:.60}")
    return value


# Security contexts of pods and containers.

USER = 65532
"""User and group of all containers, where the namespace assigns no others."""


def pod_security_context(defaults: Defaults) -> dict[str, Any]:
    """Return the security context of all pods, which Pod Security `restricted` and OpenShift's restricted-v2 admit."""
    users = {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER} if defaults.fixed_user else {}
    return {
        "runAsNonRoot": True,
        **users,
        # Kubernetes does not walk through a model cache of many gigabytes at every start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security_context() -> dict[str, Any]:
    """Return the security context of all containers."""
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


# Volumes of a worker pod, and where they are mounted.

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


# Storage of training runs in pods: a claim, or a bucket with a folder of the pod for what a run needs meanwhile.

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


# Parts of containers.


def worker_container(spec: Spec, defaults: Defaults, name: str) -> dict[str, Any]:
    """Return the fields that all containers of the worker's image have."""
    return {
        "name": name,
        "image": spec.workers.image or defaults.worker_image,
        "imagePullPolicy": defaults.worker_image_pull_policy,
        "securityContext": container_security_context(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def probe(path: str, *, tls: bool, period: int, failures: int) -> dict[str, Any]:
    """Return a probe with a timeout of five seconds: one second fails now and then on a busy node."""
    return {
        "httpGet": {"path": path, "port": Port.http, **({"scheme": "HTTPS"} if tls else {})},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
