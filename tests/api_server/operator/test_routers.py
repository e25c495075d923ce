"""The real operator with routers against a real API server: children, rest, and the first worker for held requests.

No image exists, so neither routers nor workers start: routers are played by their entries in the ConfigMap.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import GROUP
from specdecode_worker.contract.demand import HeldRequests
from support.kube import Cluster, wait_for
from support.operators.kube_objects import resource
from support.operators.operator_process import OperatorProcess

pytestmark = pytest.mark.usefixtures("crd")
CHILDREN = "deploy,cm,svc,pdb,sa,role,rolebinding"
ROUTED = {
    "router": {
        "replicas": 2,
        "template": {"spec": {"containers": [{"name": "router", "image": "localhost/none:none"}]}},
    },
    "scaling": {"minReplicas": 0, "maxReplicas": 3},
    "workers": {"image": "localhost/none:none"},
}


def apply(cluster: Cluster, namespace: str, name: str) -> None:
    cluster.apply(resource(name, **ROUTED), namespace=namespace)
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


def test_a_changed_role_is_repaired(operator: OperatorProcess, cluster: Cluster, namespace: str) -> None:
    apply(cluster, namespace, "mended")
    rules = cluster.get("role", "mended-router", namespace)["rules"]
    cluster.kubectl("patch", "role", "mended-router", "--type=merge", "-p", '{"rules": []}', namespace=namespace)
    wait_for(
        "the rules are back", lambda: cluster.get("role", "mended-router", namespace)["rules"] == rules, timeout_s=10
    )


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
