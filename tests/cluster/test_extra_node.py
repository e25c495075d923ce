"""Checks of a second node on the same machine: its pods work, and it can be lost, brought back and removed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from localcluster.settings import ExtraNode, Layout

from support.cluster_faults.extra_node import TAINT, TOLERATIONS, bring_back, extra_node, node_command
from support.kube import Cluster, KubectlError, Manifest, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400), pytest.mark.proof("extra-node")]

PAGE = "import urllib.request; print(urllib.request.urlopen('http://{host}:8080/', timeout=3).status)"


@pytest.fixture(scope="module")
def node(local_cluster: Cluster) -> Iterator[ExtraNode]:
    """Yield a second node that takes only pods with a toleration, so that nothing else runs there."""
    with extra_node([local_cluster.operator_image]) as name:
        (line,) = [line for line in node_command("list").splitlines() if line.startswith(f"{name} ")]
        yield ExtraNode(name, int(line.split()[2].split(".")[2]))


def server(name: str, image: str, node_name: str) -> Manifest:
    """Return a pod with a web server, a configuration and a memory volume, on one node."""
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["python3", "-m", "http.server", "8080", "--directory", "/config"],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
        "volumeMounts": [{"name": "config", "mountPath": "/config"}, {"name": "memory", "mountPath": "/memory"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "nodeSelector": {"kubernetes.io/hostname": node_name},
            "tolerations": TOLERATIONS,
            "containers": [container],
            "volumes": [
                {"name": "config", "configMap": {"name": "kube-root-ca.crt"}},
                {"name": "memory", "emptyDir": {"medium": "Memory"}},
            ],
        },
    }


def service(name: str) -> Manifest:
    spec = {"selector": {"app": name}, "ports": [{"port": 8080}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def address_of(cluster: Cluster, pod: str, namespace: str) -> str:
    return str(cluster.get("pod", pod, namespace)["status"]["podIP"])


def fetch(cluster: Cluster, pod: str, host: str, namespace: str) -> str:
    code = PAGE.format(host=host)
    try:
        return cluster.kubectl("exec", pod, "--", "python3", "-c", code, namespace=namespace, timeout_s=20).strip()
    except KubectlError:
        return ""


@pytest.fixture(scope="module")
def pods(cluster: Cluster, node: ExtraNode, namespace: str) -> None:
    """Run one server on each node."""
    for name, place in (("near", "specdecode-node"), ("far", node.name)):
        cluster.apply(server(name, cluster.operator_image, place), service(name), namespace=namespace)
    cluster.kubectl("wait", "pod", "near", "far", "--for=condition=Ready", "--timeout=60s", namespace=namespace)


@pytest.mark.usefixtures("pods")
def test_pods_of_both_nodes_reach_each_other(cluster: Cluster, node: ExtraNode, namespace: str) -> None:
    """By address and by the name of a Service; the addresses come from the network of each node."""
    addresses = {name: address_of(cluster, name, namespace) for name in ("near", "far")}
    assert addresses["far"].rpartition(".")[0] == node.pod_network.rpartition(".")[0]
    assert addresses["near"].rpartition(".")[0] != node.pod_network.rpartition(".")[0]
    for source, target in (("near", "far"), ("far", "near")):
        wait_for("the Service", lambda: fetch(cluster, source, target, namespace) == "200")  # noqa: B023
        assert fetch(cluster, source, addresses[target], namespace) == "200"


@pytest.mark.usefixtures("pods")
def test_logs_and_volumes_of_the_second_node(cluster: Cluster, namespace: str) -> None:
    assert "ca.crt" in cluster.kubectl("exec", "far", "--", "ls", "/config", namespace=namespace)
    mounts = cluster.kubectl("exec", "far", "--", "cat", "/proc/mounts", namespace=namespace)
    assert any(line.split()[:3:2] == ["tmpfs", "tmpfs"] and "/memory" in line for line in mounts.splitlines())
    wait_for("an access log line", lambda: "GET /" in cluster.kubectl("logs", "far", namespace=namespace))


@pytest.mark.usefixtures("pods")
def test_a_lost_node_is_not_ready_and_comes_back(cluster: Cluster, node: ExtraNode, namespace: str) -> None:
    """The cluster learns of the loss only by itself; pods of the other node stay."""
    far = address_of(cluster, "far", namespace)
    node_command("kill", node.name)
    assert cluster.get("pod", "far", namespace)["status"]["phase"] == "Running", "no word to the cluster"
    assert not fetch(cluster, "near", far, namespace)
    cluster.kubectl("wait", "node", node.name, "--for=condition=Ready=Unknown", "--timeout=90s")
    assert cluster.get("pod", "near", namespace)["status"]["containerStatuses"][0]["restartCount"] == 0
    bring_back(node.name)
    wait_for("the pod runs again", lambda: fetch(cluster, "near", "far", namespace) == "200", timeout_s=90)


@pytest.mark.usefixtures("pods")
def test_removal_leaves_nothing(cluster: Cluster, node: ExtraNode, namespace: str) -> None:
    node_command("remove", node.name)
    try:
        assert not traces(node)
        assert node.name not in cluster.kubectl("get", "nodes", "-o", "name")
        assert cluster.get("pod", "near", namespace)["status"]["containerStatuses"][0]["restartCount"] == 0
    finally:  # for the fixture's own removal
        node_command("add", node.name, "--taint", TAINT, "--images")


def traces(node: ExtraNode) -> list[str]:
    """Return what a node has left on the machine."""
    folder = node.layout(Layout.from_environment()).state
    links = json.loads(subprocess.run(["ip", "-j", "address"], capture_output=True, check=True).stdout)
    addresses = [entry["local"] for link in links for entry in link["addr_info"]]
    outputs = {
        "mount": Path("/proc/self/mountinfo").read_text(),
        "route": subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout,
        "nat rule": subprocess.run(["iptables-save", "-t", "nat"], capture_output=True, text=True, check=True).stdout,
        "process": subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout,
    }
    marks = {
        "mount": str(folder),
        "route": node.pod_network,
        "nat rule": f'"{node.cni_network}',
        "process": str(folder),
    }
    left = [f"{kind}: {line}" for kind, text in outputs.items() for line in text.splitlines() if marks[kind] in line]
    left += [f"link {link['ifname']}" for link in links if link["ifname"] == node.pod_bridge]
    left += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{node.cgroup}")]
    left += [str(path) for path in Path("/var/lib/cni/results").glob(f"{node.cni_network}-*")]
    return left + [str(folder)] * folder.exists() + [node.address] * (node.address in addresses)
