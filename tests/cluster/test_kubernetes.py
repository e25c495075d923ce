"""Cluster features that the project needs: pods, Services, DNS names, exec, logs and resource limits."""

from __future__ import annotations

import pytest

from support.kube import Cluster, Manifest, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SERVER = "server"


def container(cluster: Cluster, *words: str, memory: str = "64Mi") -> Manifest:
    return {
        "name": "main",
        "image": cluster.operator_image,
        "imagePullPolicy": "IfNotPresent",
        "command": list(words),
        "resources": {"requests": {"cpu": "10m"}, "limits": {"memory": memory}},
        "securityContext": {
            "runAsNonRoot": True,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def pod(name: str, main: Manifest) -> Manifest:
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [main]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


@pytest.fixture(scope="module")
def server(cluster: Cluster, namespace: str) -> str:
    """Deploy one web server behind a Service and return the name of the Service."""
    main = container(cluster, "python3", "-u", "-m", "http.server", "8080", "--directory", "/opt/requirements")
    main["readinessProbe"] = {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1, "timeoutSeconds": 5}
    labels = {"app": SERVER}
    deployment: Manifest = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": SERVER},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"terminationGracePeriodSeconds": 1, "containers": [main]},
            },
        },
    }
    service: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": SERVER},
        "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    cluster.apply(deployment, service, namespace=namespace)
    cluster.kubectl("rollout", "status", f"deployment/{SERVER}", "--timeout=120s", namespace=namespace)
    return SERVER


def test_a_memory_limit_is_enforced(cluster: Cluster, namespace: str) -> None:
    greedy = container(cluster, "python3", "-c", "x = bytearray(300 << 20); print(len(x))", memory="32Mi")
    cluster.apply(pod("greedy", greedy), namespace=namespace)

    def reason() -> str:
        (status,) = cluster.get("pod", "greedy", namespace)["status"]["containerStatuses"]
        return str(status["state"]["terminated"]["reason"]) if "terminated" in status["state"] else ""

    assert wait_for("the pod's end", reason) == "OOMKilled"
