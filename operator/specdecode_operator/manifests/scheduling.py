"""Pod fields for scheduling and identity: users, node selection, priority, service account and runtime class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specdecode_operator.api.v1alpha1 import WorkersSpec
from specdecode_operator.errors import SpecError
from specdecode_operator.types import Defaults

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


def scheduling(workers: WorkersSpec, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the pod that are set in ``spec.workers``; the API server validates them.

    Args:
        workers: The spec of the pods.
        labels: Labels of the pods, for spread constraints without a labelSelector.

    Raises:
        SpecError: A spread constraint has no topologyKey, by which templates are merged.
    """
    claims = [claim.model_dump(mode="json", by_alias=True) for claim in workers.resource_claims]
    fields: dict[str, Any] = {
        "nodeSelector": dict(workers.node_selector),
        "tolerations": [dict(toleration) for toleration in workers.tolerations],
        "affinity": dict(workers.affinity or {}),
        "topologySpreadConstraints": list(_spread(workers, labels)),
        "priorityClassName": workers.priority_class_name,
        "serviceAccountName": workers.service_account_name,
        "runtimeClassName": workers.runtime_class_name,
        "resourceClaims": claims,
    }
    return {name: value for name, value in fields.items() if value}


def _spread(workers: WorkersSpec, labels: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for index, constraint in enumerate(workers.topology_spread_constraints):
        if not isinstance(constraint.get("topologyKey"), str):
            raise SpecError(f"workers.topologySpreadConstraints[{index}] needs a topologyKey")
        yield {"labelSelector": {"matchLabels": dict(labels)}, **constraint}
