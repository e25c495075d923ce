"""Pods of workers: their configuration, containers and volumes, and the objects that make them. Pure."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal, DecimalException, InvalidOperation
from typing import Any, Literal, NamedTuple

from specdecode_operator.api.schema import QUANTITY
from specdecode_operator.api.v1alpha1 import (
    AWS_REGION,
    NAME_LABEL,
    DraftSpec,
    NamedDraftSpec,
    Spec,
    container_in,
    object_in,
    objects_in,
)
from specdecode_operator.drafts.job_status import run_folder
from specdecode_operator.errors import SpecError
from specdecode_operator.manifests.objects import (
    REVISIONS_KEY,
    ROLE_LABEL,
    SPEC_HASH_ANNOTATION,
    Role,
    metadata,
    plan_name,
    prefetch_name,
    prefill_name,
    public_port_name,
    selector,
    tokens_name,
    worker_name,
)
from specdecode_operator.state.learned import MAX_TEMPLATE_BYTES, PLAN_KEY, RunRecord
from specdecode_operator.types import Defaults, Deployment, Manifest
from specdecode_worker.contract import (
    GPU_DEFAULTS,
    DraftConfig,
    EngineConfig,
    Env,
    ModelConfig,
    NamedDraft,
    Port,
    ServerConfig,
    WorkerConfig,
    default_served_name,
)

CACHE_DIR = "/var/cache/specdecode"
CAPTURES_DIR = "/var/lib/specdecode/captures"
"""Folder of captured requests, one for each pod."""
TOKENS_DIR = "/etc/specdecode/tokens"
"""Folder with the admin tokens: the files ``operator``, ``router`` and ``capture``."""
API_KEYS_DIR = "/etc/specdecode/api-keys"
"""Folder with the API keys of the public port."""
TLS_DIR = "/etc/specdecode/tls"
"""Folder with the certificate, in the files of a Secret of type kubernetes.io/tls."""
MAX_THREADS = 1024
"""Largest number of torch threads, beyond any machine."""
_PINNED = re.compile("@[0-9a-f]{40}([0-9a-f]{24})?$")
"""End of an hf:// URI that names a commit."""
_FACTORS = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}
"""Factors of the suffixes of a Kubernetes quantity."""
_LARGEST_QUANTITY = Decimal(2**63 - 1)
"""What Kubernetes takes for every greater quantity."""


def worker_config(spec: Spec, uid: str) -> WorkerConfig:
    """Return the configuration in the environment of a pod. It holds nothing live: a change replaces the pods."""
    return WorkerConfig(
        deployment_uid=uid,
        model=ModelConfig(
            uri=spec.model.uri,
            adapter=spec.model.adapter,
            served_name=spec.model.served_name or default_served_name(spec.model.uri),
            dtype=spec.engine.dtype,
            quantization=spec.engine.quantization,
            max_model_len=spec.engine.max_model_len,
        ),
        draft=DraftConfig(
            method=spec.speculation.method,
            uri=spec.speculation.draft.uri if spec.speculation.draft else None,
            quantization=spec.speculation.draft.quantization if spec.speculation.draft else None,
            placement="own" if spec.has_own_draft else "shared",
        ),
        drafts=tuple(
            NamedDraft(name=draft.name, method=draft.method, uri=draft.uri, quantization=draft.quantization)
            for draft in spec.speculation.drafts
        ),
        engine=_engine(spec),
        server=_server(spec),
        capture_dir=CAPTURES_DIR,
        cache_dir=CACHE_DIR,
    )


def _engine(spec: Spec) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=spec.engine.max_num_seqs,
        kv_cache_tokens=spec.engine.kv_cache_tokens,
        kv_cache_dtype=spec.engine.kv_cache_dtype,
        max_num_batched_tokens=spec.step_tokens,
        threads=threads(spec),
        device=device(spec),
        tensor_parallel_size=spec.ranks,
        gpu_memory_utilization=spec.engine.memory_percent / 100,
        sampler=spec.engine.sampler,
        block_port=None if spec.has_own_draft else Port.blocks,
    )


def _server(spec: Spec) -> ServerConfig:
    keys = spec.api_keys_secret_ref
    return ServerConfig(
        chat_template=spec.model.chat_template,
        endpoint_delay_seconds=spec.drain.endpoint_delay_seconds,
        grace_period_seconds=spec.drain.grace_period_seconds,
        admin_tokens_path=TOKENS_DIR,
        api_keys_path=f"{API_KEYS_DIR}/{keys.key or ''}".rstrip("/") if keys else None,
        tls_cert_file=f"{TLS_DIR}/tls.crt" if spec.tls_secret_ref else None,
        tls_key_file=f"{TLS_DIR}/tls.key" if spec.tls_secret_ref else None,
    )


def device(spec: Spec) -> Literal["auto", "cpu", "cuda"]:
    """Return the device. A resource claim may bring a GPU or another device, so the worker examines what is there."""
    if spec.devices:
        return "cuda"
    return "auto" if spec.workers.has_claims else "cpu"


def model_uris(spec: Spec) -> list[str]:
    """Return the URIs of the target, its adapter and all drafts, each once."""
    speculation = spec.speculation
    drafts = [draft.uri for draft in (speculation.draft, *speculation.drafts) if draft]
    return list(dict.fromkeys(uri for uri in (spec.model.uri, spec.model.adapter, *drafts) if uri))


def unpinned_uris(spec: Spec) -> list[str]:
    """Return the hf:// URIs of the spec that name no commit: without a revision, or with a branch or a tag."""
    return [uri for uri in model_uris(spec) if uri.startswith("hf://") and not is_pinned(uri)]


def is_pinned(uri: str) -> bool:
    """Return whether an hf:// URI names a commit."""
    return _PINNED.search(uri) is not None


def threads(spec: Spec) -> int | None:
    """Return the torch threads of a CPU worker; None on another device, or without a limit of its cores."""
    return whole_cores(spec.workers.resources.limits, "workers.resources.limits") if device(spec) == "cpu" else None


def whole_cores(limits: Mapping[str, Any], field: str) -> int | None:
    """Return the whole cores of a limit, because more threads would be throttled in a step. None without a limit.

    Raises:
        SpecError: The limit in this field is no quantity.
    """
    if "cpu" not in limits:
        return None
    try:
        cores = quantity_value(limits["cpu"])
    except DecimalException:
        raise SpecError(f"{field}.cpu is {limits['cpu']!r}; write cores such as 2, 1.5 or 500m") from None
    return max(1, int(min(cores, Decimal(MAX_THREADS))))


def quantity_value(quantity: object) -> Decimal:
    """Return the number of a Kubernetes quantity.

    Raises:
        decimal.DecimalException: The text is none, or its exponent is beyond all numbers.
    """
    text = str(quantity)
    if not QUANTITY.fullmatch(text):  # Decimal reads NaN and inf too
        raise InvalidOperation(f"{text!r} is no quantity")
    suffix = next((suffix for suffix in sorted(_FACTORS, key=len, reverse=True) if text.endswith(suffix)), "")
    return min(Decimal(text.removesuffix(suffix)) * _FACTORS.get(suffix, 1), _LARGEST_QUANTITY)


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
MountedSecret = tuple[dict[str, Any], str]
"""Volume of a Secret, and the folder where it is mounted."""


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
    except DecimalException:
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
    return [
        *model_mounts(spec, read_only=True),
        *torch_mounts(),
        {"name": "captures", "mountPath": CAPTURES_DIR},
        dict(PLAN_MOUNT),
        *secret_mounts(_secrets(spec, name)),
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


def _secrets(spec: Spec, name: str) -> list[MountedSecret]:
    return [(secret_volume("tokens", tokens_name(name)), TOKENS_DIR), *public_secrets(spec)]


def public_secrets(spec: Spec) -> list[MountedSecret]:
    """Return the Secrets of the public port: its API keys and its certificate."""
    secrets: list[MountedSecret] = []
    if reference := spec.api_keys_secret_ref:
        secrets.append((secret_volume("api-keys", reference.name, reference.key), API_KEYS_DIR))
    if spec.tls_secret_ref:
        secrets.append((secret_volume("tls", spec.tls_secret_ref.name), TLS_DIR))
    return secrets


def secret_mounts(secrets: Iterable[MountedSecret]) -> list[dict[str, Any]]:
    """Return the mounts of Secrets."""
    return [{"name": secret["name"], "mountPath": folder, "readOnly": True} for secret, folder in secrets]


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


# Pod template of a worker. Every change of it replaces the pods.

STARTUP_SECONDS = 3600
"""Time in which a worker must load its model, in seconds. After that the kubelet restarts it."""
LIVE_FIELDS = {"update_policy", "recycle", "strategy"}
"""Fields of spec.workers that are no part of the pod template."""
FLEET_TEMPLATE = "the operator's setting worker.template"
RESERVED_ENV = (Env.config, Env.plan_path, Env.pod_name)
"""Variables of the worker that the operator sets and that a user's template must not replace."""


def rolling_hash(spec: Spec) -> str:
    """Return the hash of the part of the spec that replaces pods. Live fields (bounds, mode, scaling) are not in it.

    Fields at their defaults are left out, so that a field that a later version adds changes no hash. The hash of a spec
    must not change from version to version, because that would replace every pod.
    """
    speculation = spec.speculation
    engine = spec.engine.model_dump(mode="json", exclude_defaults=True)
    part = {
        "model": spec.model.model_dump(mode="json", exclude_defaults=True),
        "method": speculation.method,
        "draft": speculation.draft.uri if speculation.draft else None,
        **({"drafts": [_rolling_draft(draft) for draft in speculation.drafts]} if speculation.drafts else {}),
        **_rolling_quantization(speculation.draft),
        **({"placement": "Own"} if spec.has_own_draft else {}),
        **({"engine": engine} if engine else {}),
        **({"tls": spec.tls_secret_ref.name} if spec.tls_secret_ref else {}),
        **({"api_keys": spec.api_keys_secret_ref.model_dump(mode="json")} if spec.api_keys_secret_ref else {}),
        **({"pull_secrets": pull_secrets(spec)} if spec.image_pull_secrets else {}),
        "workers": spec.workers.model_dump(mode="json", exclude=LIVE_FIELDS, exclude_defaults=True),
        "drain": spec.drain.model_dump(mode="json", exclude_defaults=True),
        **({"model_cache": spec.model_cache} if spec.model_cache else {}),
        **({"drafts_claim": storage.claim} if (storage := spec.distillation.storage) and storage.claim else {}),
        **({"drafts_bucket": environment} if (environment := bucket_environment(spec)) else {}),
    }
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:16]


def _rolling_draft(draft: NamedDraftSpec) -> dict[str, object]:
    return draft.model_dump(mode="json", include={"name", "method", "uri"}) | _rolling_quantization(draft)


def _rolling_quantization(draft: DraftSpec | NamedDraftSpec | None) -> dict[str, object]:
    return {"quantization": draft.quantization} if draft and draft.quantization else {}


def pod_template(deployment: Deployment, defaults: Defaults) -> dict[str, Any]:
    """Return the operator's pod template with that of the settings and ``workers.template`` merged over it.

    The labels of the selector stay, whatever the user's template says.

    Raises:
        SpecError: A template cannot be merged or sets a variable of the operator, or the result is too large
            for the state ConfigMap.
    """
    spec = deployment.spec
    labels = selector(deployment.name)
    template: Mapping[str, Any] = {"metadata": {"labels": labels}, "spec": _pod(deployment, defaults)}
    for overlay, path in ((defaults.worker_template, FLEET_TEMPLATE), (spec.workers.template, "workers.template")):
        given = {variable["name"] for variable in objects_in(container_in(overlay, "worker"), "env", "name")}
        if reserved := sorted(given.intersection(RESERVED_ENV)):
            raise SpecError(f"{path} must not set {', '.join(reserved)}: the operator sets it")
        template = merged(template, overlay, path)
    template = labelled(template, labels)
    size = len(json.dumps(template))
    if size > MAX_TEMPLATE_BYTES:
        raise SpecError(f"workers.template makes a pod template of {size} bytes; at most {MAX_TEMPLATE_BYTES} fit")
    return template


def labelled(template: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the template with these labels, also where the user's template removed labels or metadata."""
    return merged({"metadata": {"labels": {}}, **template}, {"metadata": {"labels": labels}})


class UserSettings(NamedTuple):
    """Settings of the worker's container that every container with downloads gets: proxies, CAs and mirrors."""

    env: list[dict[str, Any]]
    env_from: list[dict[str, Any]]
    mounts: list[dict[str, Any]]
    volumes: list[dict[str, Any]]
    """Volumes of the mounts."""

    def given_to(self, container: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``container`` with the settings. Variables and mounts that it has stay as they are."""
        names = {variable["name"] for variable in container["env"]}
        paths = {mount["mountPath"] for mount in container["volumeMounts"]}
        return {
            **container,
            "env": [*container["env"], *(variable for variable in self.env if variable["name"] not in names)],
            **({"envFrom": [dict(source) for source in self.env_from]} if self.env_from else {}),
            "volumeMounts": [
                *container["volumeMounts"],
                *(mount for mount in self.mounts if mount["mountPath"] not in paths),
            ],
        }


def user_settings(spec: Spec, name: str, defaults: Defaults) -> UserSettings:
    """Return the variables and mounts of the worker's container in ``workers.template``, and in that of the settings.

    Of its mounts, those of volumes are returned that the template adds: the operator's own volumes have other places in
    other containers. Whatever in the template is no valid field of a pod is left out here; the merge names it.
    """
    template = merged(defaults.worker_template, spec.workers.template)
    worker = container_in(template, "worker")
    ours = {volume["name"] for volume in volumes(spec, name, defaults)}
    users = objects_in(object_in(template, "spec"), "volumes", "name")
    added = {volume["name"]: volume for volume in users if volume["name"] not in ours}
    mounts = [mount for mount in objects_in(worker, "volumeMounts", "mountPath") if mount.get("name") in added]
    used = {mount["name"] for mount in mounts}
    return UserSettings(
        # A resource of a container is that of the worker's, which the others are not.
        env=[one for one in objects_in(worker, "env", "name") if "resourceFieldRef" not in object_in(one, "valueFrom")],
        env_from=objects_in(worker, "envFrom"),
        mounts=mounts,
        volumes=[volume for volume in added.values() if volume["name"] in used],
    )


def _pod(deployment: Deployment, defaults: Defaults) -> dict[str, Any]:
    spec = deployment.spec
    drain = spec.drain
    return {
        **pod_fields(spec, defaults),
        "terminationGracePeriodSeconds": drain.endpoint_delay_seconds + drain.grace_period_seconds + 10,
        "initContainers": [user_settings(spec, deployment.name, defaults).given_to(_pull(spec, defaults))],
        "containers": [_worker(deployment, defaults)],
        "volumes": volumes(spec, deployment.name, defaults),
    }


def pod_fields(spec: Spec, defaults: Defaults) -> dict[str, Any]:
    """Return the fields that the pods of workers, routers and Jobs share."""
    return {
        "automountServiceAccountToken": False,
        # A Service called specdecode would put SPECDECODE_* variables of its own into the environment.
        "enableServiceLinks": False,
        "securityContext": pod_security_context(defaults),
        **({"imagePullSecrets": pull_secrets(spec)} if spec.image_pull_secrets else {}),
    }


def pull_secrets(spec: Spec) -> list[dict[str, str]]:
    """Return the Secrets with the credentials of registries, as in a pod."""
    return [{"name": secret.name} for secret in spec.image_pull_secrets]


def _pull(spec: Spec, defaults: Defaults) -> dict[str, Any]:
    return {
        **worker_container(spec, defaults, "pull"),
        "command": ["specdecode-worker", "pull", "--cache-dir", CACHE_DIR, *model_uris(spec)],
        "env": pull_environment(spec, defaults),
        "resources": spec.workers.resources.model_dump(mode="json", exclude_defaults=True),
        "volumeMounts": pull_mounts(spec),
    }


def pull_environment(spec: Spec, defaults: Defaults) -> list[dict[str, Any]]:
    """Return the variables of a container that downloads models."""
    secret, limit = spec.model.token_secret_ref or defaults.hub_token, cache_limit(spec, defaults)
    token = (
        [secret_variable("HF_TOKEN", secret.name, secret.key, optional=not spec.model.token_secret_ref)]
        if secret
        else []
    )
    return [
        {"name": "HOME", "value": "/tmp"},
        *_revisions(spec),
        *token,
        *([{"name": Env.cache_limit, "value": f"{limit} {CACHE_DIR}"}] if limit else []),
        *bucket_environment(spec),
    ]


def _revisions(spec: Spec) -> list[dict[str, Any]]:
    """Return the variable that names the file with the commits of unpinned models, if there are such models."""
    return [{"name": Env.revisions_path, "value": REVISIONS_PATH}] if unpinned_uris(spec) else []


def _worker(deployment: Deployment, defaults: Defaults) -> dict[str, Any]:
    spec = deployment.spec
    tls = spec.tls_secret_ref is not None
    return {
        **worker_container(spec, defaults, "worker"),
        "command": ["specdecode-worker", "serve", *spec.engine.extra_args],
        "env": _environment(deployment),
        "ports": [
            {"name": public_port_name(deployment), "containerPort": Port.http, "protocol": "TCP"},
            {"name": "admin", "containerPort": Port.admin, "protocol": "TCP"},
            {"name": "blocks", "containerPort": Port.blocks, "protocol": "TCP"},
        ],
        "resources": _resources(spec),
        "startupProbe": probe("/ready", tls=tls, period=2, failures=STARTUP_SECONDS // 2),
        "readinessProbe": probe("/ready", tls=tls, period=2, failures=2),
        "livenessProbe": probe("/health", tls=tls, period=10, failures=6),
        "volumeMounts": serving_mounts(spec, deployment.name),
    }


def _config_text(config: WorkerConfig) -> str:
    """Return the configuration as JSON without defaults, but with those that are others for a worker on a GPU."""
    document = config.model_dump(mode="json", exclude_defaults=True)
    if config.engine.device == "cuda":
        document["engine"] |= {name: getattr(config.engine, name) for name in GPU_DEFAULTS}
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


def _environment(deployment: Deployment) -> list[dict[str, Any]]:
    """Return the variables of the worker."""
    config = _config_text(worker_config(deployment.spec, deployment.uid))
    count = threads(deployment.spec)
    return [
        {"name": "HOME", "value": "/tmp"},
        *torch_environment(),
        {"name": Env.config, "value": config},
        {"name": Env.plan_path, "value": PLAN_PATH},
        *_revisions(deployment.spec),
        {"name": Env.pod_name, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        *([{"name": "OMP_NUM_THREADS", "value": str(count)}] if count else []),
        *bucket_environment(deployment.spec),
    ]


def _resources(spec: Spec) -> dict[str, Any]:
    """Return the resources of the worker's container, with its devices."""
    workers = spec.workers
    devices = {"limits": {**workers.resources.limits, workers.accelerator.resource: spec.worker_devices}}
    return {**workers.resources.model_dump(mode="json", exclude_defaults=True), **(devices if spec.devices else {})}


# Child Deployment: its pods and its rollout.


def workload(deployment: Deployment, template: Mapping[str, Any], spec_hash: str, replicas: int) -> Manifest:
    """Return the child Deployment.

    Args:
        deployment: Owner of the child.
        template: Pod template.
        spec_hash: Hash of the part of the spec that the template was made from.
        replicas: Number of workers.
    """
    strategy = {"maxSurge": deployment.spec.max_surge, "maxUnavailable": deployment.spec.max_unavailable}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(deployment, worker_name(deployment.name), annotations={SPEC_HASH_ANNOTATION: spec_hash}),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": STARTUP_SECONDS + 60,
            "selector": {"matchLabels": selector(deployment.name)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": strategy},
            "template": template,
        },
    }


def prefill_workload(deployment: Deployment, template: Mapping[str, Any], spec_hash: str, replicas: int) -> Manifest:
    """Return the child Deployment of the prefill workers: that of the workers, with the role in pods and configuration.

    The arguments are those of `workload`.
    """
    labels = {**selector(deployment.name), ROLE_LABEL: Role.prefill.value}
    template = labelled(copy.deepcopy(dict(template)), labels)
    for variable in container_in(template, "worker").get("env") or ():
        if variable["name"] == Env.config:
            config = json.loads(variable["value"])
            engine = {"block_port": Port.blocks, **config.get("engine", {}), "role": Role.prefill.value}
            variable["value"] = json.dumps({**config, "engine": engine})
    made = workload(deployment, template, spec_hash, replicas)
    named = {
        **made["metadata"],
        "name": prefill_name(deployment.name),
        "labels": {**made["metadata"]["labels"], **labels},
    }
    return {**made, "metadata": named, "spec": {**made["spec"], "selector": {"matchLabels": labels}}}


def prefetch_daemon_set(deployment: Deployment, template: Mapping[str, Any]) -> Manifest:
    """Return the DaemonSet whose pods run `pull` of the workers on the selected nodes, and then sleep.

    Args:
        deployment: Owner of the child.
        template: Pod template of the workers, whose tolerations, volumes and pull secrets the pods have.

    Raises:
        SpecError: The model cache is no folder of the node, or the template has no init container `pull`.
    """
    pod, nodes = object_in(template, "spec"), deployment.spec.prefetch_node_selector
    assert nodes is not None, "the caller wants a DaemonSet"
    sources = {volume["name"]: volume for volume in objects_in(pod, "volumes", "name")}
    if "hostPath" not in sources.get("model-cache", {}):
        raise SpecError(
            "prefetchNodeSelector: it needs modelCache.hostPath, in a namespace of Pod Security level privileged"
        )
    pull = next((one for one in objects_in(pod, "initContainers", "name") if one["name"] == "pull"), None)
    if pull is None:
        raise SpecError("prefetchNodeSelector: it needs the init container pull, which workers.template removes")
    mounted = {mount["name"] for mount in objects_in(pull, "volumeMounts", "name")}
    labels = {NAME_LABEL: deployment.name, ROLE_LABEL: Role.prefetch.value}
    kept = ("automountServiceAccountToken", "enableServiceLinks", "securityContext", "imagePullSecrets", "tolerations")
    shared = ("image", "imagePullPolicy", "securityContext")
    sleep = {"name": "filled", "command": ["sleep", "infinity"], "resources": {"requests": {"cpu": "1m"}}}
    filled = {
        **{field: pod[field] for field in kept if field in pod},
        "nodeSelector": dict(nodes),
        "terminationGracePeriodSeconds": 1,
        # Those of a worker would be reserved for as long as the pod sleeps.
        "initContainers": [{**pull, "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}}}],
        "containers": [{**{field: pull[field] for field in shared if field in pull}, **sleep}],
        "volumes": [source for name, source in sources.items() if name in mounted],
    }
    made = metadata(deployment, prefetch_name(deployment.name))
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {**made, "labels": {**made["labels"], **labels}},
        "spec": {
            "selector": {"matchLabels": labels},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%"}},
            "template": {"metadata": {"labels": labels}, "spec": filled},
        },
    }


def resolved_image(template: Mapping[str, Any]) -> str:
    """Return the image of the worker container; empty if there is none."""
    containers = (template.get("spec") or {}).get("containers") or []
    images = (container.get("image") for container in containers if container.get("name") == "worker")
    return str(next(images, "") or "")
