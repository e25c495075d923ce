"""Access of routers to the API server: an account, its rights, and the ConfigMap in which they report held requests."""

from __future__ import annotations

from specdecode_operator.manifests.identity import demand_name, router_metadata, router_name
from specdecode_operator.types import Deployment, Manifest

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
