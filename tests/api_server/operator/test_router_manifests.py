"""Children of routers and training Jobs on a real API server: admitted by Pod Security, with the chart's rights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator import manifests
from specdecode_operator.api.v1alpha1 import GROUP
from specdecode_operator.kube.kinds import PERMISSIONS
from specdecode_operator.types import Deployment, Manifest
from support.kube import Cluster, KubectlError
from support.operators.fleet import DEFAULTS, RUN, deployment_with
from support.operators.kube_objects import without_owner
from support.operators.operator_account import grant

OPERATOR = "operator"


def children(deployment: Deployment) -> list[Manifest]:
    return [
        manifests.demand_config_map(deployment),
        manifests.router_account(deployment),
        manifests.router_role(deployment),
        manifests.router_role_binding(deployment),
        manifests.router_budget(deployment),
        manifests.router_workload(deployment, DEFAULTS),
    ]


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[str]:
    """Yield a namespace that admits only pods of the restricted profile. No other test shares it."""
    with cluster.namespace("psa", wait=False) as name:
        cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
        yield name


@pytest.fixture
def deployment(cluster: Cluster, namespace: str) -> Deployment:
    spec: dict[str, Any] = {
        "router": {"replicas": 2, "template": {"spec": {"nodeSelector": {"pool": "cpu"}}}},
        "apiKeysSecretRef": {"name": "keys"},
        "tlsSecretRef": {"name": "cert"},
    }
    return replace(deployment_with(**spec), namespace=namespace)


@pytest.fixture
def operator(cluster: Cluster, namespace: str) -> str:
    """Return the flag of an account with the rights of the operator in the namespace, and nothing else."""
    return grant(cluster, namespace, OPERATOR, PERMISSIONS)


def send(cluster: Cluster, manifest: Manifest, *flags: str) -> str:
    command = ("apply", "--server-side", "--field-manager=specdecode", *flags, "-f", "-")
    return cluster.kubectl(*command, stdin=json.dumps(without_owner(manifest)))


def test_an_operator_with_the_charts_rights_creates_every_child(
    cluster: Cluster, operator: str, deployment: Deployment
) -> None:
    for child in children(deployment):
        assert "serverside-applied" in send(cluster, child, operator, *_dry(child)), child["kind"]


def test_a_router_pod_meets_the_restricted_profile(cluster: Cluster, operator: str, deployment: Deployment) -> None:
    for child in children(deployment)[1:4]:
        send(cluster, child, operator)
    template = manifests.router_workload(deployment, DEFAULTS)["spec"]["template"]
    metadata = {**template["metadata"], "name": "router", "namespace": deployment.namespace}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    assert "serverside-applied" in send(cluster, pod, "--dry-run=server")
    root = {**pod, "spec": {**template["spec"], "securityContext": {}}}
    with pytest.raises(KubectlError, match="violates PodSecurity"):
        send(cluster, root, "--dry-run=server")


def test_the_service_changes_its_selector_in_place(cluster: Cluster, operator: str, deployment: Deployment) -> None:
    for to_routers, role in ((False, "worker"), (True, "router"), (False, "worker")):
        send(cluster, manifests.service(deployment, to_routers=to_routers), operator)
        selector = cluster.get("service", "demo", deployment.namespace)["spec"]["selector"]
        assert selector == {f"{GROUP}/name": "demo", f"{GROUP}/role": role}


def test_an_operator_with_the_charts_rights_creates_every_job(cluster: Cluster, operator: str, namespace: str) -> None:
    deployment = replace(deployment_with(distillation={"storage": {"uri": "pvc://drafts"}}), namespace=namespace)
    jobs = (
        manifests.distillation_job(deployment, RUN, DEFAULTS, ("0123456789abcdef",)),
        manifests.deletion_job(deployment, RUN, DEFAULTS),
    )
    for job in jobs:
        body = json.dumps(without_owner(job))
        assert "created" in cluster.kubectl("create", operator, "--dry-run=server", "-f", "-", stdin=body)


def _dry(child: Manifest) -> tuple[str, ...]:
    """Return flags for a dry run of pods and budgets. The others are created: a binding needs its role."""
    return ("--dry-run=server",) if child["kind"] in ("Deployment", "PodDisruptionBudget") else ()
