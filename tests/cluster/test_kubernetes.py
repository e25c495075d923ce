"""Cluster features that the project needs: pods, Services, DNS names, exec, logs and resource limits."""

from __future__ import annotations

import json
import urllib.request

import pytest

from support.kube import Cluster, Manifest, wait_for
from support.tiers import skip_reason

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


def server_pod(cluster: Cluster, namespace: str) -> str:
    """Return the name of the one server pod that is Ready and not terminating.

    Waits for it, because readiness comes and goes on a busy machine.
    """
    return wait_for("one Ready server pod", lambda: _ready_pod(cluster, namespace))


def _ready_pod(cluster: Cluster, namespace: str) -> str:
    pods = cluster.list("pods", f"app={SERVER}", namespace)
    names = [
        manifest["metadata"]["name"]
        for manifest in pods
        if "deletionTimestamp" not in manifest["metadata"]
        and any(c["type"] == "Ready" and c["status"] == "True" for c in manifest["status"].get("conditions", []))
    ]
    assert len(names) == 1, names
    return str(names[0])


def test_every_node_is_ready(cluster: Cluster) -> None:
    nodes = cluster.list("nodes")
    ready = [c["status"] for node in nodes for c in node["status"]["conditions"] if c["type"] == "Ready"]
    assert ready
    assert set(ready) == {"True"}


def test_a_pod_reaches_a_service_by_name(cluster: Cluster, namespace: str, server: str) -> None:
    fetch = f"import urllib.request; print(urllib.request.urlopen('http://{server}', timeout=5).status)"
    looped = f"import time\nfor _ in range(20):\n  try:\n    {fetch}; break\n  except OSError: time.sleep(0.5)"
    cluster.apply(pod("by-name", container(cluster, "python3", "-c", looped)), namespace=namespace)
    wait_for(
        "the client pod's answer",
        lambda: cluster.kubectl("logs", "by-name", namespace=namespace).strip() == "200",
    )


def test_the_machine_reaches_a_service(cluster: Cluster, namespace: str, server: str) -> None:
    if not cluster.local:
        pytest.skip(skip_reason("local cluster", "its services are reachable from the machine"))
    address = cluster.get("service", server, namespace)["spec"]["clusterIP"]

    def status() -> int:
        with urllib.request.urlopen(f"http://{address}/", timeout=5) as answer:
            return int(answer.status)

    assert wait_for("the Service", status) == 200


def test_exec_and_logs(cluster: Cluster, namespace: str, server: str) -> None:
    name = server_pod(cluster, namespace)
    assert cluster.kubectl("exec", name, "--", "id", "-u", namespace=namespace).strip() == "65532"
    wait_for("an access log line", lambda: "GET /" in cluster.kubectl("logs", name, namespace=namespace))


def test_a_deleted_pod_is_replaced(cluster: Cluster, namespace: str, server: str) -> None:
    before = server_pod(cluster, namespace)
    cluster.kubectl("delete", "pod", before, namespace=namespace)
    after = wait_for("another Ready pod", lambda: _ready_pod(cluster, namespace))
    assert after != before


def test_a_memory_limit_is_enforced(cluster: Cluster, namespace: str) -> None:
    greedy = container(cluster, "python3", "-c", "x = bytearray(300 << 20); print(len(x))", memory="32Mi")
    cluster.apply(pod("greedy", greedy), namespace=namespace)

    def reason() -> str:
        (status,) = cluster.get("pod", "greedy", namespace)["status"]["containerStatuses"]
        return str(status["state"]["terminated"]["reason"]) if "terminated" in status["state"] else ""

    assert wait_for("the pod's end", reason) == "OOMKilled"


def test_the_api_server_serves_its_schema(cluster: Cluster) -> None:
    """The API server serves the OpenAPI schema that kubectl validates with.

    An API server that was built with the wrong version of Go serves a broken schema.
    """
    answer = json.loads(cluster.kubectl("get", "--raw", "/version"))
    assert (int(answer["major"]), int(answer["minor"].rstrip("+"))) >= (1, 30)
    assert "definitions" in json.loads(cluster.kubectl("get", "--raw", "/openapi/v2"))
