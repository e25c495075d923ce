"""Names, labels and owners of a deployment's children.

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

from enum import StrEnum
from typing import Any

from specdecode_operator.api.v1alpha1 import GROUP, KIND, VERSION
from specdecode_operator.types import Deployment


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


NAME_LABEL = f"{GROUP}/name"
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


def policy_name(name: str) -> str:
    """Return the name of the NetworkPolicy of workers and routers."""
    return name


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
