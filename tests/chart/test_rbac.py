"""Check that the operator's RBAC rules grant exactly the rights its source code uses."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specdecode_operator
from specdecode_operator.api.v1alpha1 import GROUP, PLURAL
from specdecode_operator.kube import client as cluster

Rights = dict[tuple[str, str], set[str]]
"""Verbs by API group and resource."""

SOURCE = Path(specdecode_operator.__file__).parent
KINDS = {name: kind for name, kind in vars(cluster).items() if isinstance(kind, cluster.Kind)}
BY_ARGUMENT = {"get", "list", "pages", "create", "watch", "patch", "delete"}
"""Methods of Cluster that are named after an API verb and take the kind as their first argument."""


def granted_rights(rules: list[dict[str, Any]]) -> Rights:
    """Return the rights that the rules of a Role or ClusterRole grant."""
    rights: Rights = defaultdict(set)
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                rights[group, resource] |= set(rule["verbs"])
    return dict(rights)


def resource(kind: cluster.Kind) -> tuple[str, str]:
    group, _, _ = kind.api_version.rpartition("/")
    return group, kind.plural


def used_rights() -> Rights:
    """Return the rights that the operator's modules use through Cluster, and kopf through its event handlers."""
    rights: Rights = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            for target, verbs in required_rights(call, tree):
                rights[target] |= verbs
    return dict(rights)


def required_rights(call: ast.Call, module: ast.Module) -> Iterator[tuple[tuple[str, str], set[str]]]:
    """Yield the (target, verbs) that one call of Cluster or kopf requires."""
    if not isinstance(call.func, ast.Attribute):
        return
    method, whose = call.func.attr, ast.unparse(call.func.value)
    if whose.endswith("cluster") and method in BY_ARGUMENT:
        name = ast.unparse(call.args[0])
        for kind in [KINDS[name]] if name in KINDS else kinds_in_loops(module):
            yield resource(kind), {"list" if method == "pages" else method}
    elif whose.endswith("cluster") and method == "apply":
        for kind in cluster.APPLIED.values():
            yield resource(kind), {"get", "create", "patch"}  # apply reads the object, then creates or patches it
    elif whose.endswith("cluster") and method == "apply_status":
        yield (GROUP, f"{PLURAL}/status"), {"patch"}
    elif ast.unparse(call.func) == "kopf.on.event":
        yield (GROUP, PLURAL), {"list", "watch"}


def kinds_in_loops(module: ast.Module) -> Iterator[cluster.Kind]:
    """Yield the kinds that a module passes on in loops of the form `for kind in (A, B)`."""
    for loop in (node for node in ast.walk(module) if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple)):
        names = [ast.unparse(item) for item in loop.iter.elts]
        yield from (KINDS[name] for name in names if name in KINDS)


@pytest.mark.parametrize("namespaces", [[], ["team-a"]], ids=["ClusterRole", "Role"])
def test_rights_are_exactly_what_the_code_uses(chart: Any, namespaces: list[str]) -> None:
    rendered = chart.template({"watchNamespaces": namespaces})
    role = rendered.one("Role" if namespaces else "ClusterRole")
    assert granted_rights(role["rules"]) == used_rights()


def test_each_watched_namespace_gets_a_role_and_nothing_is_cluster_wide(chart: Any) -> None:
    rendered = chart.template({"watchNamespaces": ["team-a", "team-b"]})
    assert not rendered.of("ClusterRole")
    assert not rendered.of("ClusterRoleBinding")
    for kind in ("Role", "RoleBinding"):
        namespaces = {m["metadata"]["namespace"] for m in rendered.of(kind) if m["metadata"].get("namespace")}
        assert namespaces == {"team-a", "team-b"}


def test_every_binding_is_to_the_operators_account(chart: Any) -> None:
    rendered = chart.template({"serviceAccount": {"name": "robot"}})
    assert rendered.one("ServiceAccount")["metadata"]["name"] == "robot"
    assert rendered.one("Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "robot"
    (subject,) = rendered.one("ClusterRoleBinding")["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": "robot", "namespace": "sys"}


def test_no_right_is_a_wildcard_and_secrets_cannot_be_listed(chart: Any) -> None:
    rights = granted_rights(chart.template().one("ClusterRole")["rules"])
    assert "*" not in {word for (group, name), verbs in rights.items() for word in (group, name, *verbs)}
    assert rights["", "secrets"] == {"get", "create"}


def test_the_account_of_helm_test_can_create_our_kind_and_nothing_else(chart: Any) -> None:
    (role,) = [role for role in chart.template().of("Role") if role["metadata"]["name"] == "sd-specdecode-test"]
    assert granted_rights(role["rules"]) == {(GROUP, PLURAL): {"create"}}
