"""Pod template of a worker. Every change of it replaces the pods."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from specdecode_operator.api.v1alpha1 import DraftSpec, NamedDraftSpec, Spec, WorkersSpec
from specdecode_operator.errors import SpecError
from specdecode_operator.manifests.config import CACHE_DIR, model_uris, threads, unpinned_uris, worker_config
from specdecode_operator.manifests.identity import public_port_name, selector
from specdecode_operator.manifests.merge import merged
from specdecode_operator.manifests.run_storage import bucket_environment
from specdecode_operator.manifests.scheduling import container_security_context, pod_security_context, scheduling
from specdecode_operator.manifests.volumes import (
    PLAN_PATH,
    REVISIONS_PATH,
    pull_mounts,
    secret_variable,
    serving_mounts,
    torch_environment,
    volumes,
)
from specdecode_operator.state.learned import MAX_TEMPLATE_BYTES
from specdecode_operator.types import Defaults, Deployment
from specdecode_worker.contract import Env, Port

STARTUP_SECONDS = 3600
"""Time in which a worker must load its model, in seconds. After that the kubelet restarts it."""
LIVE_FIELDS = frozenset({"update_policy", "recycle", "rollout"})
"""Fields of spec.workers that are no part of the pod template."""


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
        "required": speculation.required,
        **({"drafts": [_rolling_draft(draft) for draft in speculation.drafts]} if speculation.drafts else {}),
        **_rolling_quantization(speculation.draft),
        **({"placement": "Own"} if spec.has_own_draft else {}),
        **({"engine": engine} if engine else {}),
        **({"tls": spec.tls.secret_name} if spec.tls else {}),
        "workers": _rolling_workers(spec.workers),
        "drain": spec.drain.model_dump(mode="json", exclude_defaults=True),
        "storage": spec.storage.model_dump(mode="json", exclude_defaults=True),
        **({"drafts_claim": spec.distillation.storage.claim} if spec.distillation.storage.claim else {}),
        **({"drafts_bucket": environment} if (environment := bucket_environment(spec)) else {}),
    }
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:16]


def _rolling_workers(workers: WorkersSpec) -> dict[str, object]:
    """Return the rolling part of the workers, without values that v1alpha1 stored as defaults in its first form."""
    part = workers.model_dump(mode="json", exclude=set(LIVE_FIELDS), exclude_defaults=True)
    old_defaults = {"gpu": True, "tensor_parallel_size": 1}
    return {name: value for name, value in part.items() if value != old_defaults.get(name)}


def _rolling_draft(draft: NamedDraftSpec) -> dict[str, object]:
    return draft.model_dump(mode="json", include={"name", "method", "uri"}) | _rolling_quantization(draft)


def _rolling_quantization(draft: DraftSpec | NamedDraftSpec | None) -> dict[str, object]:
    return {"quantization": draft.quantization} if draft and draft.quantization else {}


def pod_template(deployment: Deployment, defaults: Defaults) -> dict[str, Any]:
    """Return the operator's pod template with ``workers.template`` merged over it.

    The labels of the selector stay, whatever the user's template says.

    Raises:
        SpecError: The user's template cannot be merged, or the result is too large for the state ConfigMap.
    """
    spec = deployment.spec
    labels = selector(deployment.name)
    ours = {"metadata": {"labels": labels}, "spec": _pod(deployment, defaults)}
    template = merged(ours, spec.workers.template)
    template = _labelled(template, labels)
    size = len(json.dumps(template))
    if size > MAX_TEMPLATE_BYTES:
        raise SpecError(f"workers.template makes a pod template of {size} bytes; at most {MAX_TEMPLATE_BYTES} fit")
    return template


def _labelled(template: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
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


def user_settings(spec: Spec, name: str) -> UserSettings:
    """Return the variables of ``workers.env``, ``workers.envFrom`` and the worker's container in ``workers.template``.

    Of its mounts, those of volumes are returned that the template adds: the operator's own volumes have other places in
    other containers. Whatever in the template is no valid field of a pod is left out here; the merge names it.
    """
    pod = _object(_object(spec.workers.template).get("spec"))
    worker = next((one for one in _objects(pod.get("containers"), "name") if one["name"] == "worker"), {})
    ours = {volume["name"] for volume in volumes(spec, name)}
    added = {volume["name"]: volume for volume in _objects(pod.get("volumes"), "name") if volume["name"] not in ours}
    mounts = [mount for mount in _objects(worker.get("volumeMounts"), "mountPath") if mount.get("name") in added]
    used = {mount["name"] for mount in mounts}
    variables = {
        variable["name"]: variable for variable in (*_variables(spec.workers), *_objects(worker.get("env"), "name"))
    }
    return UserSettings(
        # A resource of a container is that of the worker's, which the others are not.
        env=[one for one in variables.values() if "resourceFieldRef" not in _object(one.get("valueFrom"))],
        env_from=[*map(dict, spec.workers.env_from), *_objects(worker.get("envFrom"))],
        mounts=mounts,
        volumes=[volume for volume in added.values() if volume["name"] in used],
    )


def _object(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _objects(value: Any, *keys: str) -> list[dict[str, Any]]:
    """Return the objects of a list that have a text in each of ``keys``."""
    items = value if isinstance(value, list) else []
    return [
        dict(one) for one in items if isinstance(one, Mapping) and all(isinstance(one.get(key), str) for key in keys)
    ]


def _pod(deployment: Deployment, defaults: Defaults) -> dict[str, Any]:
    spec = deployment.spec
    drain = spec.drain
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        # A Service called specdecode would put SPECDECODE_* variables of its own into the environment.
        "enableServiceLinks": False,
        "securityContext": pod_security_context(defaults),
        "terminationGracePeriodSeconds": drain.endpoint_delay_seconds + drain.grace_period_seconds + 10,
        "initContainers": [user_settings(spec, deployment.name).given_to(_pull(spec, defaults))],
        "containers": [_worker(deployment, defaults)],
        "volumes": volumes(spec, deployment.name),
        **scheduling(spec.workers, selector(deployment.name)),
    }
    if spec.workers.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.workers.image_pull_secrets]
    return pod


def _container(spec: Spec, defaults: Defaults, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "image": spec.workers.image or defaults.worker_image,
        "imagePullPolicy": spec.workers.image_pull_policy or defaults.worker_image_pull_policy,
        "securityContext": container_security_context(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _pull(spec: Spec, defaults: Defaults) -> dict[str, Any]:
    secret = spec.model.token_secret_ref
    env = [
        {"name": "HOME", "value": "/tmp"},
        *_revisions(spec),
        *([secret_variable("HF_TOKEN", secret.name, secret.key)] if secret else []),
        *bucket_environment(spec),
    ]
    return {
        **_container(spec, defaults, "pull"),
        "command": ["specdecode-worker", "pull", "--cache-dir", CACHE_DIR, *model_uris(spec)],
        "env": env,
        "resources": spec.workers.resources.model_dump(mode="json", exclude_defaults=True),
        "volumeMounts": pull_mounts(spec),
    }


def _revisions(spec: Spec) -> list[dict[str, Any]]:
    """Return the variable that names the file with the commits of unpinned models, if there are such models."""
    return [{"name": Env.revisions_path, "value": REVISIONS_PATH}] if unpinned_uris(spec) else []


def _worker(deployment: Deployment, defaults: Defaults) -> dict[str, Any]:
    spec = deployment.spec
    tls = spec.tls is not None
    return {
        **_container(spec, defaults, "worker"),
        "command": ["specdecode-worker", "serve", *spec.engine.extra_args],
        "env": _environment(deployment),
        **({"envFrom": [dict(source) for source in spec.workers.env_from]} if spec.workers.env_from else {}),
        "ports": [
            {"name": public_port_name(deployment), "containerPort": Port.http, "protocol": "TCP"},
            {"name": "admin", "containerPort": Port.admin, "protocol": "TCP"},
        ],
        "resources": _resources(spec),
        "startupProbe": _probe("/ready", tls=tls, period=2, failures=STARTUP_SECONDS // 2),
        "readinessProbe": _probe("/ready", tls=tls, period=2, failures=2),
        "livenessProbe": _probe("/health", tls=tls, period=10, failures=6),
        "volumeMounts": serving_mounts(spec, deployment.name),
    }


def _environment(deployment: Deployment) -> list[dict[str, Any]]:
    """Return the variables of the worker; those of ``workers.env`` replace the operator's of the same name."""
    config = worker_config(deployment.spec, deployment.uid).model_dump_json(exclude_defaults=True)
    count = threads(deployment.spec)
    ours: list[dict[str, Any]] = [
        {"name": "HOME", "value": "/tmp"},
        *torch_environment(),
        {"name": Env.config, "value": config},
        {"name": Env.plan_path, "value": PLAN_PATH},
        *_revisions(deployment.spec),
        {"name": Env.pod_name, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        *([{"name": "OMP_NUM_THREADS", "value": str(count)}] if count else []),
        *bucket_environment(deployment.spec),
    ]
    users = _variables(deployment.spec.workers)
    return list({variable["name"]: variable for variable in (*ours, *users)}.values())


def _variables(workers: WorkersSpec) -> list[dict[str, Any]]:
    return [variable.model_dump(mode="json", by_alias=True, exclude_none=True) for variable in workers.env]


def _resources(spec: Spec) -> dict[str, Any]:
    """Return the resources of the worker's container, with its devices."""
    workers = spec.workers
    resources: dict[str, Any] = workers.resources.model_dump(mode="json", exclude_defaults=True)
    if workers.devices:
        limits = {**workers.resources.limits, workers.accelerator.resource: spec.worker_devices}
        resources = {**resources, "limits": limits}
    if workers.resource_claims:
        resources["claims"] = [{"name": claim.name} for claim in workers.resource_claims]
    return resources


def _probe(path: str, *, tls: bool, period: int, failures: int) -> dict[str, Any]:
    """Return a probe with a timeout of five seconds: one second fails now and then on a busy node."""
    return {
        "httpGet": {"path": path, "port": Port.http, **({"scheme": "HTTPS"} if tls else {})},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
