"""A feature of the cluster that the project needs, and that no other test would find missing: limits of memory."""

from __future__ import annotations

import pytest

from support.kube import Cluster, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def test_a_memory_limit_is_enforced(cluster: Cluster, namespace: str) -> None:
    greedy = {
        "name": "main",
        "image": cluster.operator_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", "x = bytearray(300 << 20); print(len(x))"],
        "resources": {"requests": {"cpu": "10m"}, "limits": {"memory": "32Mi"}},
    }
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [greedy]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "greedy"}, "spec": spec}
    cluster.apply(pod, namespace=namespace)

    def reason() -> str:
        (status,) = cluster.get("pod", "greedy", namespace)["status"]["containerStatuses"]
        return str(status["state"]["terminated"]["reason"]) if "terminated" in status["state"] else ""

    assert wait_for("the pod's end", reason) == "OOMKilled"
