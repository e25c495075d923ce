"""Row 8: whatever the API server or the node refuses is named in a condition within 30 s; the other children exist."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from support.kube import Manifest, wait_for
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import ServedDeployment, Tenant, stand_in_template

NAME = "refused"
LIMIT_SECONDS = 30
ALL_CHILDREN = {"deployment": "-worker", "service": "", "configmap": "-plan", "pdb": "-worker"}
RESTRICTED = "pod-security.kubernetes.io/enforce"


def overlay(**pod: Any) -> Manifest:
    """Return the stand-in's template with more fields of the pod's spec."""
    template = stand_in_template({})
    volumes = [*template["spec"]["volumes"], *pod.pop("volumes", [])]
    return {"spec": {**template["spec"], "volumes": volumes, **pod}}


def unmountable() -> Manifest:
    """Return the stand-in's template with a mounted volume whose ConfigMap does not exist."""
    template = overlay(volumes=[{"name": "extra", "configMap": {"name": "missing-config"}}])
    template["spec"]["containers"][0]["volumeMounts"].append({"name": "extra", "mountPath": "/extra"})
    return template


def quota(name: str, resource: str) -> tuple[str, Manifest]:
    """Return a quota that allows none of a resource."""
    return "quota", {"metadata": {"name": name}, "spec": {"hard": {resource: "0"}}}


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refusal: its cause, and the texts that one condition must contain."""

    named: tuple[str, ...]
    policy: tuple[str, Manifest] | None = None
    """Kind and manifest of an object in the namespace that causes it."""
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the deployment that cause it."""
    refused: frozenset[str] = frozenset()
    """Kinds of children that cannot exist."""


LIMIT = {"metadata": {"name": "small"}, "spec": {"limits": [{"type": "Container", "max": {"memory": "16Mi"}}]}}
STRANGER = {
    "metadata": {
        "name": f"{NAME}-worker",
        "labels": {
            "specdecode.io/name": NAME,
            "specdecode.io/role": "worker",
            "specdecode.io/variant": "stable",
            "app.kubernetes.io/managed-by": "specdecode",
        },
    },
    "spec": {
        "replicas": 0,
        "selector": {"matchLabels": {"app": "earlier"}},
        "template": {
            "metadata": {"labels": {"app": "earlier"}},
            "spec": {"containers": [{"name": "worker", "image": "localhost/earlier:1"}]},
        },
    },
}

REFUSALS = {
    "quota of pods": Refusal(("exceeded quota", "no-pods"), quota("no-pods", "pods")),
    "quota of Secrets": Refusal(("Secret", "exceeded quota"), quota("no-secrets", "count/secrets")),
    "quota of budgets": Refusal(
        ("PodDisruptionBudget", f"{NAME}-worker", "exceeded quota"),
        quota("no-pdb", "count/poddisruptionbudgets.policy"),
        refused=frozenset({"pdb"}),
    ),
    "Pod Security": Refusal(
        ("violates PodSecurity",),
        namespace_labels={RESTRICTED: "restricted"},
        fields={"workers": {"template": overlay(hostNetwork=True)}},
    ),
    "LimitRange": Refusal(("maximum memory usage per Container is 16Mi",), ("limitrange", LIMIT)),
    "missing Secret of API keys": Refusal(
        ("missing-keys", "not found"), fields={"apiKeysSecretRef": {"name": "missing-keys"}}
    ),
    "missing claim": Refusal(
        ("missing-claim", "not found"), fields={"modelCache": {"persistentVolumeClaim": {"claimName": "missing-claim"}}}
    ),
    "volume that cannot be mounted": Refusal(
        ("missing-config", "not found"), fields={"workers": {"template": unmountable()}}
    ),
    "image that cannot be pulled": Refusal(
        ("localhost/missing-image:1",), fields={"workers": {"image": "localhost/missing-image:1"}}
    ),
    "immutable selector": Refusal(("Deployment", f"{NAME}-worker", "immutable"), ("deployment", STRANGER)),
}


@contextmanager
def policed(tenant: Tenant, refusal: Refusal) -> Iterator[None]:
    """Hold the namespace under the refusal's policy while the block runs."""
    api, namespace = tenant.api, tenant.namespace
    labels = dict(refusal.namespace_labels)
    api.patch("namespace", None, namespace, {"metadata": {"labels": labels}})
    if refusal.policy:
        kind, manifest = refusal.policy
        api.create(kind, namespace, manifest)
    if refusal.policy and refusal.policy[0] == "quota":
        name = refusal.policy[1]["metadata"]["name"]
        wait_for("the quota counts", lambda: "hard" in api.get("quota", namespace, name)["status"], timeout_s=20)
    try:
        yield
    finally:
        api.patch("namespace", None, namespace, {"metadata": {"labels": dict.fromkeys(labels)}})
        remove_cause(tenant, refusal)


def remove_cause(tenant: Tenant, refusal: Refusal) -> None:
    if refusal.policy:
        tenant.api.delete(refusal.policy[0], tenant.namespace, refusal.policy[1]["metadata"]["name"])


def check_named_and_others_applied(served: ServedDeployment, label: str, refusal: Refusal, figures: Figures) -> None:
    """Assert that a condition names the refusal in time and that all other children exist."""
    label = f"{label}: seconds to a condition"
    figures.record_seconds(8, label, lambda: served.is_named(*refusal.named), limit_s=LIMIT_SECONDS, every_s=0.2)
    missing = [
        kind
        for kind, suffix in ALL_CHILDREN.items()
        if kind not in refusal.refused and served.child(kind, suffix) is None
    ]
    assert not missing, "these children exist, whatever was refused"


@pytest.mark.parametrize("label", REFUSALS)
def test_refusal_is_named(tenant: Tenant, figures: Figures, label: str) -> None:
    refusal = REFUSALS[label]
    with policed(tenant, refusal), tenant.deployment(NAME, ready=False, **refusal.fields) as served:
        try:
            check_named_and_others_applied(served, label, refusal, figures)
        finally:
            remove_cause(tenant, refusal)  # before the deployment's children are awaited: the cause may carry its label


@contextmanager
def unavailable_webhook(tenant: Tenant) -> Iterator[None]:
    """Refuse every Service of the namespace by an admission webhook that cannot be reached."""
    name = f"unavailable.{tenant.namespace}.example.com"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": ["services"]}
    webhook = {
        "name": name,
        "rules": [rule],
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 2,
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": tenant.namespace}},
        "clientConfig": {"service": {"name": "missing-webhook", "namespace": tenant.namespace}},
    }
    tenant.api.create("webhook", None, {"metadata": {"name": name}, "webhooks": [webhook]})
    try:
        time.sleep(2)  # until the API server has loaded the configuration
        yield
    finally:
        tenant.api.delete("webhook", None, name)


def test_unavailable_webhook_is_named(tenant: Tenant, figures: Figures) -> None:
    refusal = Refusal(("Service", NAME, "failed calling webhook"), refused=frozenset({"service"}))
    with unavailable_webhook(tenant), tenant.deployment(NAME, ready=False) as served:
        check_named_and_others_applied(served, "unavailable webhook", refusal, figures)
