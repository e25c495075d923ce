"""Routers of a deployment: their pods, settings, access to the API server, rollout and disruption budget."""

from __future__ import annotations

import json
from typing import Any

from specdecode_operator.api.v1alpha1 import TrafficShareSpec
from specdecode_operator.manifests.objects import (
    TokenScope,
    budget_of,
    demand_name,
    headless_name,
    public_port_name,
    router_labels,
    router_metadata,
    router_name,
    tokens_name,
)
from specdecode_operator.manifests.pods import (
    API_KEYS_DIR,
    TLS_DIR,
    TOKENS_DIR,
    MountedSecret,
    container_security_context,
    labelled,
    merged,
    pod_fields,
    probe,
    public_secrets,
    secret_mounts,
    secret_volume,
)
from specdecode_operator.types import Defaults, Deployment, Manifest
from specdecode_worker.contract import Env, Port

# Routers of a deployment: their pods, settings, rollout and disruption budget.

OTHER_TOKENS_DIR = "/etc/specdecode/other-tokens"
"""Folder with a folder of each other deployment that shares the traffic."""
SETTINGS_DIR = "/etc/specdecode/settings"
SETTINGS_KEY = "settings.json"
"""Entry of the ConfigMap with the settings that routers read again when they change."""
EXIT_SECONDS = 10
"""Time beyond the drain in which the process ends."""
PROGRESS_SECONDS = 600
"""Time in which a rollout must make progress; a router loads nothing and is ready within seconds."""
TMP_LIMIT = "64Mi"
RESOURCES = {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
"""Resources of a router: one process on one core. An autoscaler by CPU needs the request."""


def router_workload(deployment: Deployment, defaults: Defaults) -> Manifest:
    """Return the Deployment of the routers. A rollout adds a router before it takes one away.

    The number of replicas is absent while an autoscaler sets it, so that it stays the autoscaler's field; the applier
    keeps the present number.

    Raises:
        SpecError: A template cannot be merged.
    """
    router = deployment.spec.router
    replicas = {} if router.autoscaled and router.replicas else {"replicas": router.replicas}
    labels = metadata_labels(deployment)
    ours = {"metadata": {"labels": labels}, "spec": _pod(deployment, defaults)}
    template = merged(ours, defaults.router_template, "the operator's setting router.template")
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": router_metadata(deployment, router_name(deployment.name)),
        "spec": {
            **replicas,
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": PROGRESS_SECONDS,
            "selector": {"matchLabels": router_labels(deployment.name)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": labelled(merged(template, router.template, "router.template"), labels),
        },
    }


def router_settings(deployment: Deployment) -> Manifest:
    """Return the ConfigMap with the settings that change while routers run: a change of them must cut no stream."""
    router = deployment.spec.router
    settings = {
        "hold_seconds": router.hold_seconds,
        # A request whose only worker left waits for the next one as long as a new request does.
        "no_worker_seconds": router.hold_seconds,
        "percents": {one.deployment: one.percent for one in _others(deployment)},
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": router_metadata(deployment, router_name(deployment.name)),
        "data": {SETTINGS_KEY: json.dumps(settings)},
    }


def router_budget(deployment: Deployment) -> Manifest:
    """Return the PodDisruptionBudget of the routers."""
    return budget_of(router_metadata(deployment, router_name(deployment.name)), router_labels(deployment.name))


def metadata_labels(deployment: Deployment) -> dict[str, str]:
    """Return the labels of a router pod."""
    labels: dict[str, str] = router_metadata(deployment, router_name(deployment.name))["labels"]
    return labels


def _pod(deployment: Deployment, defaults: Defaults) -> dict[str, Any]:
    spec = deployment.spec
    drain = spec.drain
    return {
        **pod_fields(spec, defaults),
        "serviceAccountName": router_name(deployment.name),
        # A router watches EndpointSlices and reports held requests.
        "automountServiceAccountToken": True,
        "terminationGracePeriodSeconds": drain.endpoint_delay_seconds + drain.grace_period_seconds + EXIT_SECONDS,
        "containers": [_container(deployment, defaults)],
        "volumes": [
            *(secret for secret, _ in _secrets(deployment)),
            {"name": "settings", "configMap": {"name": router_name(deployment.name)}},
            {"name": "tmp", "emptyDir": {"sizeLimit": TMP_LIMIT}},
        ],
        **_spread(router_labels(deployment.name)),
    }


def _container(deployment: Deployment, defaults: Defaults) -> dict[str, Any]:
    spec = deployment.spec
    tls = spec.tls_secret_ref is not None
    return {
        "name": "router",
        "image": defaults.router_image,
        "imagePullPolicy": defaults.router_image_pull_policy,
        "command": ["specdecode-router", "serve", *arguments(deployment)],
        "env": [
            {"name": "HOME", "value": "/tmp"},
            {"name": Env.pod_name, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        "ports": [{"name": public_port_name(deployment), "containerPort": Port.http, "protocol": "TCP"}],
        "resources": RESOURCES,
        "startupProbe": probe("/ready", tls=tls, period=1, failures=60),
        "readinessProbe": probe("/ready", tls=tls, period=2, failures=2),
        "livenessProbe": probe("/health", tls=tls, period=10, failures=3),
        "securityContext": container_security_context(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            *secret_mounts(_secrets(deployment)),
            # As a folder: a file mounted by subPath would never be updated.
            {"name": "settings", "mountPath": SETTINGS_DIR, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def arguments(deployment: Deployment) -> list[str]:
    """Return the flags of ``specdecode-router serve``."""
    spec, name = deployment.spec, deployment.name
    keys = spec.api_keys_secret_ref
    values: dict[str, object] = {
        "host": "0.0.0.0",
        "port": Port.http,
        "namespace": deployment.namespace,
        "service": headless_name(name),
        "deployment": name,
        "demand-config-map": demand_name(name),
        "admin-token-file": f"{TOKENS_DIR}/{TokenScope.router.value}",
        "live-settings-file": f"{SETTINGS_DIR}/{SETTINGS_KEY}",
        "endpoint-delay-seconds": spec.drain.endpoint_delay_seconds,
        "grace-period-seconds": spec.drain.grace_period_seconds,
    }
    if keys:
        values["api-keys-path"] = f"{API_KEYS_DIR}/{keys.key or ''}".rstrip("/")
    if spec.tls_secret_ref:
        files = {"tls-cert-file": "tls.crt", "tls-key-file": "tls.key", "ca-file": "ca.crt"}
        values |= {flag: f"{TLS_DIR}/{file}" for flag, file in files.items()}
    return [*(f"--{flag}={value}" for flag, value in values.items()), *map(_backend, _others(deployment))]


def _others(deployment: Deployment) -> list[TrafficShareSpec]:
    """Return the other deployments that share the traffic, without this one, which a rule of the CRD excludes."""
    return [one for one in deployment.spec.router.traffic_split if one.deployment != deployment.name]


def _backend(share: TrafficShareSpec) -> str:
    """Return the flag of another deployment. Its percent is in the settings."""
    name = share.deployment
    token = f"{OTHER_TOKENS_DIR}/{name}/{TokenScope.router.value}"
    return f"--backend=name={name},service={headless_name(name)},token-file={token}"


def _secrets(deployment: Deployment) -> list[MountedSecret]:
    """Return the mounted Secrets. Of the admin tokens only the routers' own is mounted."""
    own = secret_volume("tokens", tokens_name(deployment.name), TokenScope.router.value)
    mounted = [(own, TOKENS_DIR), *public_secrets(deployment.spec)]
    for number, one in enumerate(_others(deployment)):
        volume = secret_volume(f"tokens-{number}", tokens_name(one.deployment), TokenScope.router.value)
        # The other deployment may come later; the routers must start without it.
        optional = {**volume, "secret": {**volume["secret"], "optional": True}}
        mounted.append((optional, f"{OTHER_TOKENS_DIR}/{one.deployment}"))
    return mounted


def _spread(labels: dict[str, str]) -> dict[str, Any]:
    """Return the fields of the pod by which the routers of a deployment prefer different nodes and zones."""
    spread = {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
    apart = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
    return {"affinity": {"podAntiAffinity": apart}, "topologySpreadConstraints": [spread]}


# Access of routers to the API server: an account, its rights, and the ConfigMap in which they report held requests.

_RBAC = "rbac.authorization.k8s.io"


def router_account(deployment: Deployment) -> Manifest:
    """Return the ServiceAccount of the routers."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": router_metadata(deployment, router_name(deployment.name)),
        "automountServiceAccountToken": False,
    }


def router_role(deployment: Deployment) -> Manifest:
    """Return the rights of the routers in their namespace. The operator holds all of them, as it must to grant them."""
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "Role",
        "metadata": router_metadata(deployment, router_name(deployment.name)),
        "rules": [
            # A watch by label cannot be limited to names.
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
            {
                "apiGroups": [""],
                "resources": ["configmaps"],
                "resourceNames": [demand_name(deployment.name)],
                "verbs": ["get", "patch"],
            },
        ],
    }


def router_role_binding(deployment: Deployment) -> Manifest:
    """Return the binding of the role to the account."""
    name = router_name(deployment.name)
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": router_metadata(deployment, name),
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": deployment.namespace}],
    }


def demand_config_map(deployment: Deployment) -> Manifest:
    """Return the ConfigMap in which routers report held requests. Its data are theirs, so the manifest has none."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": router_metadata(deployment, demand_name(deployment.name)),
    }
