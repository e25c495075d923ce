"""Account with rights of the operator in one namespace of the cluster of the tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from support.kube import Cluster

RBAC = "rbac.authorization.k8s.io"
Rights = Mapping[tuple[str, str], frozenset[str]]
"""Verbs by API group and resource."""


def grant(cluster: Cluster, namespace: str, name: str, *rights: Rights) -> str:
    """Create an account with these rights in the namespace, and nothing else. Return kubectl's flag to act as it."""
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": sorted(verbs)}
        for part in rights
        for (group, resource), verbs in part.items()
    ]
    reference = {"apiGroup": RBAC, "kind": "Role", "name": name}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}},
        {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": {"name": name}, "rules": rules},
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": name},
            "roleRef": reference,
            "subjects": [subject],
        },
        namespace=namespace,
    )
    return f"--as=system:serviceaccount:{namespace}:{name}"


def kubeconfig_of(cluster: Cluster, namespace: str, name: str, folder: Path) -> Path:
    """Write a kubeconfig with a token of an account and return its path."""
    document = yaml.safe_load(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten"))
    token = cluster.kubectl("create", "token", name, namespace=namespace).strip()
    for user in document["users"]:
        user["user"] = {"token": token}
    path = folder / f"{name}.kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return path
