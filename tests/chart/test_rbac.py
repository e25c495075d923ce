"""Check that the operator's RBAC rules grant exactly the rights that its code declares, and users theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from specdecode_operator import manifests
from specdecode_operator.api.draft import DRAFT_PLURAL
from specdecode_operator.api.v1alpha1 import GROUP, PLURAL
from specdecode_operator.kube import kinds
from specdecode_operator.settings import read_settings
from support.operators.fleet import deployment_of

Rights = dict[tuple[str, str], set[str]]
"""Verbs by API group and resource."""
SCOPES: list[list[str]] = [[], ["team-a"]]


def granted_rights(rules: list[dict[str, Any]]) -> Rights:
    """Return the rights that the rules of a Role or ClusterRole grant."""
    rights: Rights = defaultdict(set)
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                rights[group, resource] |= set(rule["verbs"])
    return dict(rights)


def named(rendered: Any, kind: str, name: str) -> dict[str, Any]:
    (manifest,) = [manifest for manifest in rendered.of(kind) if manifest["metadata"]["name"] == name]
    return manifest  # type: ignore[no-any-return]


def served_rules(chart: Any, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    kind = "Role" if values.get("watchNamespaces") else "ClusterRole"
    return named(chart.template(values), kind, "sys:sd-specdecode")["rules"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("namespaces", SCOPES, ids=["ClusterRole", "Role"])
def test_rights_in_served_namespaces(chart: Any, namespaces: list[str]) -> None:
    granted = granted_rights(served_rules(chart, {"watchNamespaces": namespaces}))
    assert granted == kinds.PERMISSIONS
    assert granted["", "secrets"] == {"create"}
    assert granted["", "pods"] == {"list", "watch"}


def test_rights_in_the_own_namespace_are_limited_to_names(chart: Any) -> None:
    """Every right but create names its object: the Lease of this release, the master key of the tokens."""
    for values, lease in (({}, "sd-specdecode"), ({"leaderElection": {"leaseName": "chosen"}}, "chosen")):
        rendered = chart.template(values)
        assert read_settings(rendered.environment).lease_name == lease, "the operator uses it"
        role = named(rendered, "Role", "sys:sd-specdecode:own")
        assert "namespace" not in role["metadata"], "the release's namespace"
        assert granted_rights(role["rules"]) == kinds.OWN_NAMESPACE_PERMISSIONS
        names = {rule["resources"][0]: rule["resourceNames"] for rule in role["rules"] if rule["verbs"] != ["create"]}
        assert names == {"leases": [lease], "secrets": ["specdecode-operator-token-key"]}


@pytest.mark.parametrize("namespaces", SCOPES, ids=["ClusterRole", "Role"])
def test_the_operator_holds_every_right_that_it_grants_to_routers(chart: Any, namespaces: list[str]) -> None:
    """Kubernetes refuses a role with more rights than its author has, unless the author may escalate."""
    deployment = deployment_of({"model": {"uri": "embedded://t"}, "router": {"replicas": 2}})
    held = granted_rights(served_rules(chart, {"watchNamespaces": namespaces}))
    for target, verbs in granted_rights(manifests.router_role(deployment)["rules"]).items():
        assert verbs <= held[target], target
    assert not {"escalate", "bind"} & {verb for verbs in held.values() for verb in verbs}


def test_each_watched_namespace_gets_a_role_and_nothing_is_bound_cluster_wide(chart: Any) -> None:
    rendered = chart.template({"watchNamespaces": ["team-a", "2026"]})
    assert not rendered.of("ClusterRoleBinding")
    assert {role["metadata"]["name"].partition("-")[0] for role in rendered.of("ClusterRole")} == {"specdecode"}
    for kind in ("Role", "RoleBinding"):
        namespaces = {m["metadata"]["namespace"] for m in rendered.of(kind) if m["metadata"].get("namespace")}
        assert namespaces == {"team-a", "2026"}, "a name of digits is no number"


def test_the_release_namespace_may_be_watched(chart: Any) -> None:
    rendered = chart.template({"watchNamespaces": ["sys"]})
    names = [manifest["metadata"]["name"] for manifest in rendered.of("Role")]
    assert len(names) == len(set(names))


def test_every_binding_is_to_the_operators_account_and_an_existing_role(chart: Any) -> None:
    rendered = chart.template({"serviceAccount": {"name": "robot"}})
    assert rendered.one("ServiceAccount")["metadata"]["name"] == "robot"
    assert rendered.one("Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "robot"
    for binding in (rendered.one("ClusterRoleBinding"), rendered.one("RoleBinding")):
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "robot", "namespace": "sys"}]
        assert named(rendered, binding["roleRef"]["kind"], binding["roleRef"]["name"])


def test_aggregated_roles_extend_those_of_kubernetes(chart: Any) -> None:
    rendered = chart.template()
    verbs = {}
    for role in ("view", "edit", "admin"):
        manifest = named(rendered, "ClusterRole", f"specdecode-{role}")
        assert manifest["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{role}"] == "true"
        rights = granted_rights(manifest["rules"])
        drafts = {(GROUP, DRAFT_PLURAL), (GROUP, f"{DRAFT_PLURAL}/status")}
        assert set(rights) == {(GROUP, PLURAL), (GROUP, f"{PLURAL}/status"), (GROUP, f"{PLURAL}/scale"), *drafts}
        assert rights[GROUP, f"{PLURAL}/status"] == {"get"}, "the status belongs to the operator"
        verbs[role] = rights[GROUP, PLURAL]
    assert verbs["view"] == {"get", "list", "watch"}
    assert verbs["edit"] == verbs["view"] | {"create", "delete", "patch", "update"}
    assert verbs["admin"] == verbs["edit"] | {"deletecollection"}


@pytest.mark.parametrize("values", [{"rbac": {"aggregateRoles": False}}, {"crds": {"enabled": False}}], ids=str)
def test_aggregated_roles_can_be_left_to_another_release(chart: Any, values: dict[str, Any]) -> None:
    """They exist once on a cluster, as the CRD does: a release without the CRD must not collide."""
    roles = chart.template(values).of("ClusterRole")
    assert [role["metadata"]["name"] for role in roles] == ["sys:sd-specdecode"]


@pytest.mark.slow
def test_the_account_of_helm_test_can_create_our_kind_and_nothing_else(chart: Any) -> None:
    assert granted_rights(named(chart.template(), "Role", "sd-specdecode-test")["rules"]) == {
        (GROUP, PLURAL): {"create"}
    }
