"""Names, labels and owners of a deployment's children."""

from __future__ import annotations

from typing import Any

from specdecode_operator.api.v1alpha1 import GROUP, KIND, VERSION
from specdecode_operator.types import Deployment

ROLE = "worker"
VARIANT = "stable"
PLAN_KEY = "plan.json"
ADMIN_TOKEN_KEY = "token"
SPEC_HASH_ANNOTATION = f"{GROUP}/spec-hash"
DELETION_COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
"""Kubernetes' own: of the pods of a ReplicaSet that shrinks, the one with the lowest goes first."""
"""On the workload: hash of the part of the spec that its pod template was made of."""


def worker_name(name: str) -> str:
    return f"{name}-worker"


def plan_name(name: str) -> str:
    return f"{name}-plan"


def state_name(name: str) -> str:
    return f"{name}-state"


def child_names(name: str) -> tuple[str, ...]:
    """Of everything that is applied again and again."""
    return name, worker_name(name), plan_name(name), state_name(name)


def admin_secret_name(name: str) -> str:
    return f"{name}-admin"


def service_url(namespace: str, name: str) -> str:
    return f"http://{name}.{namespace}.svc/v1"


def service_labels(name: str) -> dict[str, str]:
    """What the Service selects: every variant that takes requests."""
    return {f"{GROUP}/name": name, f"{GROUP}/role": ROLE}


def selector(name: str) -> dict[str, str]:
    """Labels of one workload's pods; immutable once applied."""
    return {**service_labels(name), f"{GROUP}/variant": VARIANT}


def metadata(deployment: Deployment, name: str, **more: Any) -> dict[str, Any]:
    """Metadata of a child: owned, so that it goes when the deployment goes, operator or not."""
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
