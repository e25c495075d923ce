"""Names, labels and owners of a deployment's children, and those that are not of pods.

| role (label specdecode.io/role) | pods | in the public Service |
|---|---|---|
| worker | serve requests: prompts and decoding | yes, unless routers are ready |
| prefill | compute prompts only, and pass the KV cache on | no |
| router | accept requests and choose a worker for each | yes, once one is ready |
| prefetch | fill the model caches of nodes | no |
| job | train or evaluate drafts; they end by themselves | no |

Selectors are immutable, so a later version may add roles and must not change these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from specdecode_operator.api.v1alpha1 import GROUP, KIND, NAME_LABEL, VERSION
from specdecode_operator.state.learned import PLAN_KEY
from specdecode_operator.types import Deployment, Manifest, PolicyPeers
from specdecode_worker.contract import Plan, Port, Revisions


class Role(StrEnum):
    """Values of the label specdecode.io/role, described in the table of this module."""

    worker = "worker"
    prefill = "prefill"
    router = "router"
    prefetch = "prefetch"
    job = "job"


class TokenScope(StrEnum):
    """Files of the tokens Secret. A worker admits a token to the routes of its file's scope."""

    operator = "operator"
    router = "router"
    capture = "capture"


ROLE_LABEL = f"{GROUP}/role"
VARIANT_LABEL = f"{GROUP}/variant"
VARIANT = "stable"
REVISIONS_KEY = "revisions.json"
"""Key of the plan's ConfigMap with the commits of models whose URI names none."""
SPEC_HASH_ANNOTATION = f"{GROUP}/spec-hash"
"""Annotation of the workload: hash of the part of the spec that its pod template was made from."""


def worker_name(name: str) -> str:
    """Return the name of the workload and of its PodDisruptionBudget."""
    return f"{name}-worker"


def prefill_name(name: str) -> str:
    """Return the name of the Deployment of the prefill workers."""
    return f"{name}-prefill"


def prefetch_name(name: str) -> str:
    """Return the name of the DaemonSet that fills the model caches of nodes."""
    return f"{name}-prefetch"


def headless_name(name: str) -> str:
    """Return the name of the headless Service that has an address for every ready worker."""
    return f"{name}-workers"


def plan_name(name: str) -> str:
    """Return the name of the ConfigMap with the plan."""
    return f"{name}-plan"


def state_name(name: str) -> str:
    """Return the name of the ConfigMap with the deployment state."""
    return f"{name}-state"


def tokens_name(name: str) -> str:
    """Return the name of the Secret with the admin tokens."""
    return f"{name}-tokens"


def router_name(name: str) -> str:
    """Return the name of the routers' Deployment, ConfigMap, PodDisruptionBudget, ServiceAccount, Role and binding."""
    return f"{name}-router"


def demand_name(name: str) -> str:
    """Return the name of the ConfigMap in which routers report held requests."""
    return f"{name}-demand"


def child_names(name: str) -> tuple[str, ...]:
    """Return the names of all objects that the operator creates for a deployment."""
    own = (worker_name, headless_name, plan_name, state_name, tokens_name)
    return name, *(make(name) for make in (*own, prefill_name, prefetch_name, router_name, demand_name))


def service_url(namespace: str, name: str, *, tls: bool = False) -> str:
    """Return the base URL of the OpenAI API within the cluster."""
    return f"{'https' if tls else 'http'}://{name}.{namespace}.svc/v1"


def public_port_name(deployment: Deployment) -> str:
    """Return the name of port 8000 in pods and Services, by which monitors and routers choose the scheme."""
    return "http" if deployment.spec.tls_secret_ref is None else "https"


def service_labels(name: str) -> dict[str, str]:
    """Return the labels of the workers that the Services select: every variant that accepts requests."""
    return {NAME_LABEL: name, ROLE_LABEL: Role.worker.value}


def router_labels(name: str) -> dict[str, str]:
    """Return the labels by which routers are selected; immutable once applied."""
    return {NAME_LABEL: name, ROLE_LABEL: Role.router.value}


def selector(name: str) -> dict[str, str]:
    """Return the labels of the pods of the workload; immutable once applied."""
    return {**service_labels(name), VARIANT_LABEL: VARIANT}


def metadata(deployment: Deployment, name: str, **more: Any) -> dict[str, Any]:
    """Return the metadata of a child. The owner reference lets it end with the deployment, without the operator."""
    return {
        "name": name,
        "namespace": deployment.namespace,
        "labels": {
            **selector(deployment.name),
            "app.kubernetes.io/name": "specdecode-worker",
            "app.kubernetes.io/instance": deployment.name,
            "app.kubernetes.io/managed-by": "specdecode",
        },
        "ownerReferences": [
            {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": deployment.name,
                "uid": deployment.uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
        **more,
    }


def router_metadata(deployment: Deployment, name: str) -> dict[str, Any]:
    """Return the metadata of a child that belongs to the routers."""
    made = metadata(deployment, name)
    others = {key: value for key, value in made["labels"].items() if key not in (ROLE_LABEL, VARIANT_LABEL)}
    labels = {**others, **router_labels(deployment.name), "app.kubernetes.io/name": "specdecode-router"}
    return {**made, "labels": labels}


def service(deployment: Deployment, *, to_routers: bool = False) -> Manifest:
    """Return the endpoint of the OpenAI API. The admin port is not part of it.

    Args:
        deployment: Owner of the Service.
        to_routers: Select the routers instead of the workers.
    """
    number = 80 if deployment.spec.tls_secret_ref is None else 443
    # A number, not a name: pods from before a change of spec.tlsSecretRef have the port under another name.
    ports = [{"name": public_port_name(deployment), "port": number, "targetPort": Port.http, "protocol": "TCP"}]
    selected = {"selector": router_labels(deployment.name)} if to_routers else {}
    return _service(deployment, deployment.name, {"type": "ClusterIP", "ports": ports, **selected})


def headless_service(deployment: Deployment) -> Manifest:
    """Return the Service whose DNS name has the addresses of all ready workers, with both ports.

    Routers (by its EndpointSlices) and certificates (``*.<name>-workers.<namespace>.svc``) use it.
    """
    ports = [
        {"name": public_port_name(deployment), "port": Port.http, "targetPort": Port.http, "protocol": "TCP"},
        {"name": "admin", "port": Port.admin, "targetPort": "admin", "protocol": "TCP"},
    ]
    return _service(
        deployment, headless_name(deployment.name), {"type": "ClusterIP", "clusterIP": "None", "ports": ports}
    )


def plan_config_map(deployment: Deployment, plan: Plan, revisions: Mapping[str, str] | None = None) -> Manifest:
    """Return the ConfigMap with the plan that new pods mount.

    Args:
        deployment: Owner of the ConfigMap.
        plan: The plan.
        revisions: Commits that new pods fetch, by the URI of a model that names none.
    """
    files = {PLAN_KEY: plan.model_dump_json()}
    if revisions:
        files[REVISIONS_KEY] = Revisions(revisions=dict(sorted(revisions.items()))).model_dump_json()
    return _config_map(deployment, plan_name(deployment.name), files)


def state_config_map(deployment: Deployment, data: Mapping[str, str]) -> Manifest:
    """Return the ConfigMap with the state that survives the operator."""
    return _config_map(deployment, state_name(deployment.name), data)


def tokens_secret(deployment: Deployment, tokens: Mapping[str, Sequence[str]]) -> Manifest:
    """Return the Secret with the admin tokens. It is created once and never applied again.

    Args:
        deployment: Owner of the Secret.
        tokens: Tokens by scope (``TokenScope``), the current one first. Each scope becomes a file, one token a line.
    """
    files = {str(scope): "".join(f"{token}\n" for token in lines) for scope, lines in tokens.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": metadata(deployment, tokens_name(deployment.name)),
        "stringData": files,
    }


def budget(deployment: Deployment) -> Manifest:
    """Return the PodDisruptionBudget of the workers."""
    return budget_of(metadata(deployment, worker_name(deployment.name)), selector(deployment.name))


def budget_of(made: Mapping[str, Any], labels: Mapping[str, str]) -> Manifest:
    """Return a PodDisruptionBudget of pods with these labels: one may be evicted at a time, and broken ones always."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": made,
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": labels},
        },
    }


def network_policy(deployment: Deployment, peers: PolicyPeers) -> Manifest:
    """Return the NetworkPolicy of workers and routers, with the clients of the public port and of the admin port.

    The admin port serves the operator, the routers of the namespace, of which those of a deployment that shares its
    traffic have a token, and the deployment's own training Jobs. The port of cache blocks serves the deployment's own
    workers.
    """
    routers = {"podSelector": {"matchLabels": {ROLE_LABEL: Role.router.value}}}
    jobs = {"podSelector": {"matchLabels": {NAME_LABEL: deployment.name, ROLE_LABEL: Role.job.value}}}
    own = {"key": ROLE_LABEL, "operator": "In", "values": [Role.worker.value, Role.prefill.value]}
    workers = {"podSelector": {"matchLabels": {NAME_LABEL: deployment.name}, "matchExpressions": [own]}}
    rules: list[dict[str, Any]] = [
        {"ports": [{"protocol": "TCP", "port": Port.http}], **({"from": list(peers.clients)} if peers.clients else {})},
        {"ports": [{"protocol": "TCP", "port": Port.admin}], "from": [*peers.admins, routers, jobs]},
        {"ports": [{"protocol": "TCP", "port": Port.blocks}], "from": [workers]},
    ]
    roles = {"key": ROLE_LABEL, "operator": "In", "values": [Role.worker.value, Role.prefill.value, Role.router.value]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(deployment, deployment.name),
        "spec": {
            "podSelector": {"matchLabels": {NAME_LABEL: deployment.name}, "matchExpressions": [roles]},
            "policyTypes": ["Ingress"],
            "ingress": rules,
        },
    }


def _service(deployment: Deployment, name: str, spec: Mapping[str, Any]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(deployment, name),
        "spec": {"selector": service_labels(deployment.name), **spec},
    }


def _config_map(deployment: Deployment, name: str, data: Mapping[str, str]) -> Manifest:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(deployment, name), "data": dict(data)}
