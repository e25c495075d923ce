"""Security contexts of pods and containers."""

from __future__ import annotations

from typing import Any

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
