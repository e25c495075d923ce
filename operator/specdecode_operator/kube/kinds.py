"""Kinds of Kubernetes objects that the operator uses, and the permissions that it needs for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from specdecode_operator.api.draft import DRAFT_KIND, DRAFT_PLURAL
from specdecode_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION

FIELD_MANAGER = "specdecode"
"""Name under which the API server records the fields that the operator applies."""
HAND_OVER_MANAGER = f"{FIELD_MANAGER}-hand-over"
"""Name under which a field keeps its value that the operator applied and leaves to another client."""

Child = tuple[str, str, str]
"""Kind, namespace and name of a child."""


class Kind(NamedTuple):
    """A kind of object and its place in the API's paths."""

    api_version: str
    kind: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the path of an object, or of the collection if there is no name. Namespace None means all of them."""
        root = "api" if "/" not in self.api_version else "apis"
        parts = [root, self.api_version, *(["namespaces", namespace] if namespace else []), self.plural]
        return "/" + "/".join([*parts, *([name] if name else []), *([subresource] if subresource else [])])


DEPLOYMENTS = Kind(f"{GROUP}/{VERSION}", KIND, PLURAL)
DRAFTS = Kind(f"{GROUP}/{VERSION}", DRAFT_KIND, DRAFT_PLURAL)
WORKLOADS = Kind("apps/v1", "Deployment", "deployments")
DAEMON_SETS = Kind("apps/v1", "DaemonSet", "daemonsets")
PODS = Kind("v1", "Pod", "pods")
SERVICES = Kind("v1", "Service", "services")
CONFIG_MAPS = Kind("v1", "ConfigMap", "configmaps")
SECRETS = Kind("v1", "Secret", "secrets")
EVENTS = Kind("v1", "Event", "events")
BUDGETS = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICIES = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
SERVICE_ACCOUNTS = Kind("v1", "ServiceAccount", "serviceaccounts")
ROLES = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDINGS = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
JOBS = Kind("batch/v1", "Job", "jobs")
RULES_REVIEWS = Kind("authorization.k8s.io/v1", "SelfSubjectRulesReview", "selfsubjectrulesreviews")
LEASES = Kind("coordination.k8s.io/v1", "Lease", "leases")

EVICTION = "eviction"
"""Subresource of a pod."""

APPLIED = {
    kind.kind: kind
    for kind in (
        WORKLOADS,
        DAEMON_SETS,
        SERVICES,
        CONFIG_MAPS,
        BUDGETS,
        NETWORK_POLICIES,
        SERVICE_ACCOUNTS,
        ROLES,
        ROLE_BINDINGS,
    )
}
"""Kinds that are applied from manifests."""

_CHILD_VERBS = frozenset({"get", "list", "watch", "create", "patch"})

PERMISSIONS: Mapping[tuple[str, str], frozenset[str]] = {
    (GROUP, PLURAL): frozenset({"get", "list", "watch"}),
    (GROUP, f"{PLURAL}/status"): frozenset({"patch"}),
    # Written by the operator too: roles after a trial, and drafts of training runs.
    (GROUP, DRAFT_PLURAL): frozenset({"get", "list", "watch", "create", "update", "delete"}),
    (GROUP, f"{DRAFT_PLURAL}/status"): frozenset({"update"}),
    ("apps", "deployments"): _CHILD_VERBS,
    # Deleted when spec.prefetchNodeSelector is removed.
    ("apps", "daemonsets"): _CHILD_VERBS | {"delete"},
    ("", "services"): _CHILD_VERBS,
    ("", "configmaps"): _CHILD_VERBS,
    ("policy", "poddisruptionbudgets"): _CHILD_VERBS,
    # Deleted when the chart's networkPolicy.enabled becomes false.
    ("networking.k8s.io", "networkpolicies"): _CHILD_VERBS | {"delete"},
    ("", "serviceaccounts"): _CHILD_VERBS,
    ("rbac.authorization.k8s.io", "roles"): _CHILD_VERBS,
    ("rbac.authorization.k8s.io", "rolebindings"): _CHILD_VERBS,
    # Not used by the operator: a right can be granted to routers only by an account that holds it.
    ("discovery.k8s.io", "endpointslices"): frozenset({"list", "watch"}),
    # Created once and never changed: Kueue changes them.
    ("batch", "jobs"): frozenset({"get", "list", "watch", "create", "delete"}),
    ("", "pods"): frozenset({"list", "watch"}),
    ("", f"pods/{EVICTION}"): frozenset({"create"}),
    ("", "events"): frozenset({"create", "list"}),
    ("", "secrets"): frozenset({"create"}),
}
"""All permissions in namespaces of users, by API group and resource. The chart's role is compared with this."""

OWN_NAMESPACE_PERMISSIONS: Mapping[tuple[str, str], frozenset[str]] = {
    ("coordination.k8s.io", "leases"): frozenset({"get", "create", "update", "patch"}),
    ("", "secrets"): frozenset({"get", "create"}),
}
"""Further permissions in the operator's own namespace: its Lease, and its Secret with the token key."""
