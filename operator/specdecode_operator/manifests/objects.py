"""The smaller children: Service, ConfigMaps, Secret, PodDisruptionBudget."""

from __future__ import annotations

from collections.abc import Mapping

from specdecode_operator.manifests.identity import (
    ADMIN_TOKEN_KEY,
    PLAN_KEY,
    admin_secret_name,
    metadata,
    plan_name,
    selector,
    service_labels,
    state_name,
    worker_name,
)
from specdecode_operator.types import Deployment, Manifest
from specdecode_worker.contract import Plan


def service(deployment: Deployment) -> Manifest:
    """The endpoint. The admin port is not in it."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(deployment, deployment.name),
        "spec": {
            "type": "ClusterIP",
            "selector": service_labels(deployment.name),
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def plan_config_map(deployment: Deployment, plan: Plan) -> Manifest:
    """What new pods mount."""
    return _config_map(deployment, plan_name(deployment.name), {PLAN_KEY: plan.model_dump_json()})


def state_config_map(deployment: Deployment, data: Mapping[str, str]) -> Manifest:
    """The operator's memory of this deployment."""
    return _config_map(deployment, state_name(deployment.name), data)


def admin_secret(deployment: Deployment, token: str) -> Manifest:
    """Guards the workers' admin ports. Created once, never applied again."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": metadata(deployment, admin_secret_name(deployment.name)),
        "stringData": {ADMIN_TOKEN_KEY: token},
    }


def budget(deployment: Deployment) -> Manifest:
    """One worker at a time may be drained."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(deployment, worker_name(deployment.name)),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector(deployment.name)}},
    }


def _config_map(deployment: Deployment, name: str, data: Mapping[str, str]) -> Manifest:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(deployment, name), "data": dict(data)}
