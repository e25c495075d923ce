"""Smaller children: Services, ConfigMaps, Secret and PodDisruptionBudget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdecode_operator.manifests.identity import (
    NAME_LABEL,
    REVISIONS_KEY,
    ROLE_LABEL,
    Role,
    headless_name,
    metadata,
    plan_name,
    policy_name,
    public_port_name,
    router_labels,
    selector,
    service_labels,
    state_name,
    tokens_name,
    worker_name,
)
from specdecode_operator.state.learned import PLAN_KEY
from specdecode_operator.types import Deployment, Manifest, PolicyPeers
from specdecode_worker.contract import Plan, Port, Revisions


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
    return _secret(deployment, tokens_name(deployment.name), files)


def budget(deployment: Deployment) -> Manifest:
    """Return the PodDisruptionBudget: one worker at a time may be evicted, and broken ones always."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(deployment, worker_name(deployment.name)),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector(deployment.name)},
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
        "metadata": metadata(deployment, policy_name(deployment.name)),
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


def _secret(deployment: Deployment, name: str, files: Mapping[str, str]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": metadata(deployment, name),
        "stringData": dict(files),
    }
