"""The real operator with routers against a real API server: children, rest, and the first worker for held requests.

No image exists, so neither routers nor workers start: routers are played by their entries in the ConfigMap.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator import manifests
from specdecode_operator.api.v1alpha1 import GROUP, KIND, VERSION
from specdecode_operator.kube.kinds import PERMISSIONS
from specdecode_operator.types import Deployment, Manifest
from specdecode_worker.contract.demand import HeldRequests
from support.kube import Cluster, KubectlError, wait_for
from support.operators.fleet import DEFAULTS, SPEC, deep, deployment_with
from support.operators.operator_account import grant
from support.operators.operator_process import OperatorProcess

CHILDREN = "deploy,cm,svc,pdb,sa,role,rolebinding"
ROUTED = {
    "replicas": 0,
    "router": {
        "replicas": 2,
        "template": {"spec": {"containers": [{"name": "router", "image": "localhost/none:none"}]}},
    },
    "scaling": {"minReplicas": 0, "maxReplicas": 3},
    "workers": {"image": "localhost/none:none"},
}


def apply(cluster: Cluster, namespace: str, name: str) -> None:
    manifest = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": name}}
    cluster.apply({**manifest, "spec": deep(SPEC, ROUTED)}, namespace=namespace)
    wait_for("the routers", lambda: cluster.get("deploy", f"{name}-router", namespace), timeout_s=30)


def hold(cluster: Cluster, namespace: str, name: str, requests: int) -> None:
    """Write the entry of a router that holds requests."""
    entry = HeldRequests(requests=requests, at=time.time()).model_dump_json()
    patch = json.dumps({"data": {f"{name}-router-a": entry}})
    cluster.kubectl("patch", "cm", f"{name}-demand", "--type=merge", "-p", patch, namespace=namespace)


def replicas(cluster: Cluster, namespace: str, name: str) -> int:
    return int(cluster.get("deploy", f"{name}-worker", namespace)["spec"]["replicas"])


def status(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    return cluster.get("sdd", name, namespace).get("status") or {}


@pytest.mark.usefixtures("crd")
def test_routers_get_their_objects_which_stay_the_same(
    operator: OperatorProcess, cluster: Cluster, namespace: str
) -> None:
    apply(cluster, namespace, "made")
    wait_for("the status", lambda: status(cluster, namespace, "made").get("router"), timeout_s=30)

    def versions() -> dict[str, str]:
        made = cluster.list(CHILDREN, f"{GROUP}/name=made", namespace)
        specs = {f"{one['kind']}/{one['metadata']['name']}": one["metadata"] for one in made}
        return {name: f"{one['uid']} {one.get('generation', one['resourceVersion'])}" for name, one in specs.items()}

    settled = versions()
    for kind in ("ServiceAccount", "Role", "RoleBinding", "PodDisruptionBudget", "Deployment"):
        assert f"{kind}/made-router" in settled
    assert "ConfigMap/made-demand" in settled
    selector = cluster.get("svc", "made", namespace)["spec"]["selector"]
    assert selector[f"{GROUP}/role"] == "worker", "no router is ready"
    assert status(cluster, namespace, "made")["router"]["ready"] == "0/2"
    time.sleep(6)
    assert versions() == settled, "a deployment at rest is written"


@pytest.mark.usefixtures("crd")
def test_a_changed_role_is_repaired(operator: OperatorProcess, cluster: Cluster, namespace: str) -> None:
    apply(cluster, namespace, "mended")
    rules = cluster.get("role", "mended-router", namespace)["rules"]
    cluster.kubectl("patch", "role", "mended-router", "--type=merge", "-p", '{"rules": []}', namespace=namespace)
    wait_for(
        "the rules are back", lambda: cluster.get("role", "mended-router", namespace)["rules"] == rules, timeout_s=10
    )


@pytest.mark.usefixtures("crd")
def test_held_requests_start_a_worker_within_five_seconds(
    operator: OperatorProcess, cluster: Cluster, namespace: str
) -> None:
    apply(cluster, namespace, "woken")
    time.sleep(3)
    assert replicas(cluster, namespace, "woken") == 0
    hold(cluster, namespace, "woken", 1)
    wait_for("a worker is wanted", lambda: replicas(cluster, namespace, "woken") == 1, timeout_s=5)
    last = wait_for(
        "the decision is in the history",
        lambda: (status(cluster, namespace, "woken").get("speculation") or {}).get("history"),
        timeout_s=10,
    )
    assert "routers hold a request" in json.dumps(last)


@pytest.mark.usefixtures("crd")
def test_requests_that_were_held_while_the_operator_was_gone_start_a_worker(
    operator: OperatorProcess, cluster: Cluster, namespace: str
) -> None:
    apply(cluster, namespace, "later")
    time.sleep(3)
    operator.kill()
    hold(cluster, namespace, "later", 20)
    time.sleep(1)
    assert replicas(cluster, namespace, "later") == 0
    operator.start()
    wait_for("workers are wanted", lambda: replicas(cluster, namespace, "later") == 2, timeout_s=30)


@pytest.mark.usefixtures("crd")
def test_routers_are_removed_on_request(operator: OperatorProcess, cluster: Cluster, namespace: str) -> None:
    apply(cluster, namespace, "plain")
    patch = json.dumps({"spec": {"router": {"replicas": 0}, "scaling": {"minReplicas": 1}}})
    cluster.kubectl("patch", "sdd", "plain", "--type=merge", "-p", patch, namespace=namespace)
    wait_for(
        "no router is wanted",
        lambda: cluster.get("deploy", "plain-router", namespace)["spec"]["replicas"] == 0,
        timeout_s=15,
    )
    wait_for("its status", lambda: "router" not in status(cluster, namespace, "plain"), timeout_s=15)


# Routers' children on a real API server: admitted by Pod Security, by an operator with the chart's rights.


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
    """Apply a manifest without its owner, which does not exist: the garbage collector would delete the object."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "ownerReferences"}
    manifest = {**manifest, "metadata": metadata}
    command = ("apply", "--server-side", "--field-manager=specdecode", *flags, "-f", "-")
    return cluster.kubectl(*command, stdin=json.dumps(manifest))


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


def test_an_operator_cannot_grant_more_than_it_holds(cluster: Cluster, operator: str, deployment: Deployment) -> None:
    role = manifests.router_role(deployment)
    more = {**role, "rules": [*role["rules"], {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]}
    with pytest.raises(KubectlError, match="attempting to grant RBAC permissions not currently held"):
        send(cluster, more, operator, "--dry-run=server")


def test_a_router_may_do_what_it_needs_and_no_more(cluster: Cluster, operator: str, deployment: Deployment) -> None:
    for child in children(deployment)[:4]:
        send(cluster, child, operator)
    account = f"--as=system:serviceaccount:{deployment.namespace}:demo-router"

    def may(*words: str) -> bool:
        try:
            return cluster.kubectl("auth", "can-i", *words, account, namespace=deployment.namespace).strip() == "yes"
        except KubectlError:
            return False

    assert may("watch", "endpointslices.discovery.k8s.io")
    assert may("patch", "configmaps/demo-demand")
    for words in (
        ("patch", "configmaps/demo-plan"),
        ("get", "secrets"),
        ("list", "pods"),
        ("update", f"specdecodedeployments.{GROUP}"),
        ("create", "configmaps"),
    ):
        assert not may(*words), words


def test_the_service_changes_its_selector_in_place(cluster: Cluster, operator: str, deployment: Deployment) -> None:
    for to_routers, role in ((False, "worker"), (True, "router"), (False, "worker")):
        send(cluster, manifests.service(deployment, to_routers=to_routers), operator)
        selector = cluster.get("service", "demo", deployment.namespace)["spec"]["selector"]
        assert selector == {f"{GROUP}/name": "demo", f"{GROUP}/role": role}


def test_data_of_routers_survive_an_apply_of_the_operator(
    cluster: Cluster, operator: str, deployment: Deployment
) -> None:
    manifest = manifests.demand_config_map(deployment)
    send(cluster, manifest, operator)
    patch = json.dumps({"data": {"router-a": "{}"}})
    cluster.kubectl("patch", "configmap", "demo-demand", "--type=merge", "-p", patch, namespace=deployment.namespace)
    send(cluster, manifest, operator)
    assert cluster.get("configmap", "demo-demand", deployment.namespace)["data"] == {"router-a": "{}"}


def _dry(child: Manifest) -> tuple[str, ...]:
    """Return flags for a dry run of pods and budgets. The others are created: a binding needs its role."""
    return ("--dry-run=server",) if child["kind"] in ("Deployment", "PodDisruptionBudget") else ()
