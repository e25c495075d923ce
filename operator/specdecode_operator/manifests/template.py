"""The pod template of a worker: all that rolls pods when it changes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from specdecode_operator.api.v1alpha1 import DraftSpec, NamedDraftSpec, Spec
from specdecode_operator.errors import SpecError
from specdecode_operator.manifests.config import CACHE_DIR, model_uris, threads, worker_config
from specdecode_operator.manifests.identity import ADMIN_TOKEN_KEY, admin_secret_name, selector
from specdecode_operator.manifests.merge import merged
from specdecode_operator.manifests.volumes import COMPILED_DIR, PLAN_PATH, model_mounts, serving_mounts, volumes
from specdecode_operator.state.learned import MAX_TEMPLATE_BYTES
from specdecode_operator.types import Defaults, Deployment
from specdecode_worker.contract import Env, Port

USER = 65532
STARTUP_SECONDS = 3600
"""How long loading a model may take before the kubelet gives up on a pod."""


def rolling_hash(spec: Spec) -> str:
    """Hash of the part of the spec that rolls pods. What is live (bounds, mode, scaling) is not in it.

    Fields at their defaults are left out, so that a field that a later version adds changes no hash: this text must
    stay what it is from version to version, or an upgrade rolls every pod.
    """
    speculation = spec.speculation
    part = {
        "model": spec.model.model_dump(mode="json", exclude_defaults=True),
        "method": speculation.method,
        "draft": speculation.draft.uri if speculation.draft else None,
        "required": speculation.required,
        **({"drafts": [_rolling_draft(draft) for draft in speculation.drafts]} if speculation.drafts else {}),
        **_rolling_quantization(speculation.draft),
        "workers": spec.workers.model_dump(mode="json", exclude={"update_policy", "recycle"}, exclude_defaults=True),
        "drain": spec.drain.model_dump(mode="json", exclude_defaults=True),
        "storage": spec.storage.model_dump(mode="json", exclude_defaults=True),
    }
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:16]


def _rolling_draft(draft: NamedDraftSpec) -> dict[str, object]:
    return draft.model_dump(mode="json", include={"name", "method", "uri"}) | _rolling_quantization(draft)


def _rolling_quantization(draft: DraftSpec | NamedDraftSpec | None) -> dict[str, object]:
    return {"quantization": draft.quantization} if draft and draft.quantization else {}


def pod_template(deployment: Deployment, defaults: Defaults) -> dict[str, Any]:
    """Ours with ``workers.template`` merged over it; the selector's labels stay whatever the overlay says."""
    spec = deployment.spec
    labels = selector(deployment.name)
    ours = {"metadata": {"labels": labels}, "spec": _pod(deployment, defaults)}
    template = merged(ours, spec.workers.template)
    template = merged(template, {"metadata": {"labels": labels}})
    size = len(json.dumps(template))
    if size > MAX_TEMPLATE_BYTES:
        raise SpecError(f"workers.template makes a pod template of {size} bytes; at most {MAX_TEMPLATE_BYTES} fit")
    return template


def _pod(deployment: Deployment, defaults: Defaults) -> dict[str, Any]:
    spec = deployment.spec
    drain = spec.drain
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        # A Service called specdecode would put SPECDECODE_* variables of its own into the environment.
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            # A model cache of many gigabytes is not walked through at every start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": drain.endpoint_delay_seconds + drain.grace_period_seconds + 10,
        "initContainers": [_pull(spec, defaults)],
        "containers": [_worker(deployment, defaults)],
        "volumes": volumes(spec, deployment.name),
    }
    if spec.workers.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.workers.image_pull_secrets]
    return pod


def _container(spec: Spec, defaults: Defaults, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "image": spec.workers.image or defaults.worker_image,
        "imagePullPolicy": spec.workers.image_pull_policy or defaults.worker_image_pull_policy,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _pull(spec: Spec, defaults: Defaults) -> dict[str, Any]:
    secret = spec.model.token_secret_ref
    token = {"secretKeyRef": {"name": secret.name, "key": secret.key}} if secret else None
    return {
        **_container(spec, defaults, "pull"),
        "command": ["specdecode-worker", "pull", "--cache-dir", CACHE_DIR, *model_uris(spec)],
        "env": [{"name": "HOME", "value": "/tmp"}, *([{"name": "HF_TOKEN", "valueFrom": token}] if token else [])],
        "resources": spec.workers.resources,
        "volumeMounts": model_mounts(spec),
    }


def _worker(deployment: Deployment, defaults: Defaults) -> dict[str, Any]:
    spec = deployment.spec
    return {
        **_container(spec, defaults, "worker"),
        "command": ["specdecode-worker", "serve"],
        "env": _environment(deployment),
        "ports": [
            {"name": "http", "containerPort": Port.http, "protocol": "TCP"},
            {"name": "admin", "containerPort": Port.admin, "protocol": "TCP"},
        ],
        "resources": _resources(spec),
        "startupProbe": _probe("/ready", period=2, failures=STARTUP_SECONDS // 2),
        "readinessProbe": _probe("/ready", period=2, failures=2),
        "livenessProbe": _probe("/health", period=10, failures=6),
        "volumeMounts": serving_mounts(spec),
    }


def _environment(deployment: Deployment) -> list[dict[str, Any]]:
    config = worker_config(deployment.spec, deployment.uid).model_dump_json(exclude_defaults=True)
    token = {"name": admin_secret_name(deployment.name), "key": ADMIN_TOKEN_KEY}
    found: list[dict[str, Any]] = [
        {"name": "HOME", "value": "/tmp"},
        # The image's own values of these lie in the model cache, which is read-only here and may be shared.
        {"name": "XDG_CACHE_HOME", "value": COMPILED_DIR},
        {"name": "TRITON_CACHE_DIR", "value": f"{COMPILED_DIR}/triton"},
        {"name": "TORCHINDUCTOR_CACHE_DIR", "value": f"{COMPILED_DIR}/inductor"},
        {"name": Env.config, "value": config},
        {"name": Env.plan_path, "value": PLAN_PATH},
        {"name": Env.admin_token, "valueFrom": {"secretKeyRef": token}},
        {"name": Env.pod_name, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    keys = deployment.spec.workers.api_keys_secret_ref
    if keys:
        reference = {"secretKeyRef": {"name": keys.name, "key": keys.key}}
        found.append({"name": Env.api_keys, "valueFrom": reference})
    count = threads(deployment.spec)
    return found + ([{"name": "OMP_NUM_THREADS", "value": str(count)}] if count else [])


def _resources(spec: Spec) -> dict[str, Any]:
    if not spec.workers.gpu:
        return spec.workers.resources
    gpus = {"limits": {"nvidia.com/gpu": spec.workers.tensor_parallel_size}}
    return merged(spec.workers.resources, gpus, "workers.resources")


def _probe(path: str, *, period: int, failures: int) -> dict[str, Any]:
    """A timeout of five seconds: one second fails now and then on a busy node."""
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
