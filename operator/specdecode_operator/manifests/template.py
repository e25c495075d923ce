"""Pod template of a worker, and the Deployment that runs it. Every change of the template replaces the pods."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from specdecode_operator.api.v1alpha1 import DraftSpec, NamedDraftSpec, Spec, container_in, object_in, objects_in
from specdecode_operator.errors import SpecError
from specdecode_operator.manifests.config import CACHE_DIR, model_uris, threads, unpinned_uris, worker_config
from specdecode_operator.manifests.identity import (
    NAME_LABEL,
    ROLE_LABEL,
    SPEC_HASH_ANNOTATION,
    Role,
    metadata,
    prefetch_name,
    prefill_name,
    public_port_name,
    selector,
    worker_name,
)
from specdecode_operator.manifests.pods import (
    PLAN_PATH,
    REVISIONS_PATH,
    bucket_environment,
    cache_limit,
    merged,
    pod_security_context,
    probe,
    pull_mounts,
    secret_variable,
    serving_mounts,
    torch_environment,
    volumes,
    worker_container,
)
from specdecode_operator.state.learned import MAX_TEMPLATE_BYTES
from specdecode_operator.types import Defaults, Deployment, Manifest
from specdecode_worker.contract import Env, Port

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
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        # A Service called specdecode would put SPECDECODE_* variables of its own into the environment.
        "enableServiceLinks": False,
        "securityContext": pod_security_context(defaults),
        "terminationGracePeriodSeconds": drain.endpoint_delay_seconds + drain.grace_period_seconds + 10,
        "initContainers": [user_settings(spec, deployment.name, defaults).given_to(_pull(spec, defaults))],
        "containers": [_worker(deployment, defaults)],
        "volumes": volumes(spec, deployment.name, defaults),
    }
    if spec.image_pull_secrets:
        pod["imagePullSecrets"] = pull_secrets(spec)
    return pod


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


def _environment(deployment: Deployment) -> list[dict[str, Any]]:
    """Return the variables of the worker."""
    config = worker_config(deployment.spec, deployment.uid).model_dump_json(exclude_defaults=True)
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
    resources: dict[str, Any] = workers.resources.model_dump(mode="json", exclude_defaults=True)
    if spec.devices:
        limits = {**workers.resources.limits, workers.accelerator.resource: spec.worker_devices}
        resources = {**resources, "limits": limits}
    return resources


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
    for variable in container_in(template, "worker")["env"]:
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
        SpecError: The model cache is no folder of the node.
    """
    pod, nodes = template["spec"], deployment.spec.prefetch_node_selector
    assert nodes is not None, "the caller wants a DaemonSet"
    sources = {volume["name"]: volume for volume in pod["volumes"]}
    if "hostPath" not in sources.get("model-cache", {}):
        raise SpecError(
            "prefetchNodeSelector: it needs modelCache.hostPath, in a namespace of Pod Security level privileged"
        )
    pull = next(one for one in pod["initContainers"] if one["name"] == "pull")
    mounted = {mount["name"] for mount in pull["volumeMounts"]}
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
        "containers": [{**{field: pull[field] for field in shared}, **sleep}],
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
