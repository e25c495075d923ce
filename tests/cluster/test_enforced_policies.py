"""NetworkPolicies of chart and operator on a network that enforces them: the ports that one pod reaches of another."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import yaml

from specdecode_operator.api.v1alpha1 import Spec, Status
from specdecode_operator.manifests import network_policy
from specdecode_operator.manifests.objects import ROLE_LABEL, Role, router_labels, selector
from specdecode_operator.settings import read_settings
from specdecode_operator.types import Deployment
from support.kube import CHART, HELM, ROOT, Cluster, Manifest, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600), pytest.mark.proof("network-policies")]
COMMAND = ROOT / "hack" / "cluster" / "network-policies"
OPERATOR_LABELS = {"app.kubernetes.io/name": "specdecode-operator", "app.kubernetes.io/instance": "sd"}
PORTS = {8000: "http", 8001: "admin", 8002: "blocks", 8080: "health", 9090: "metrics", 9999: "other"}
PROBE = """
import json, socket, sys
def reach(host, port):
    try:
        socket.create_connection((host, port), timeout=2).close()
        return True
    except OSError:
        return False
print(json.dumps([[host, port] for host, port in json.loads(sys.argv[1]) if reach(host, port)]))
"""
SERVE = """
import socket, threading, time
for port in PORTS:
    threading.Thread(target=lambda s: [s.accept()[0].close() for _ in iter(int, 1)],
                     args=(socket.create_server(("", port)),), daemon=True).start()
time.sleep(100000)
"""


@dataclass(frozen=True, slots=True)
class Pods:
    """Pods that listen on all ports, by name; the first part of a name is the place in which it runs."""

    cluster: Cluster
    namespaces: dict[str, str]

    def apply(self, name: str, labels: dict[str, str], image: str) -> None:
        """Start a pod with a name such as ``team/worker``."""
        container = {
            "name": "main",
            "image": image,
            "imagePullPolicy": "Never",
            "command": ["python3", "-c", SERVE.replace("PORTS", str(list(PORTS)))],
            "ports": [{"name": name, "containerPort": port} for port, name in PORTS.items()],
        }
        place, _, short = name.partition("/")
        spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
        metadata = {"name": short, "labels": labels}
        pod: Manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        self.cluster.apply(pod, namespace=self.namespaces[place])

    def address(self, name: str) -> str:
        place, _, short = name.partition("/")
        return str(self.cluster.get("pod", short, self.namespaces[place])["status"]["podIP"])

    def reached(self, source: str, targets: list[str]) -> dict[str, set[int]]:
        """Return the ports of each target that a pod can connect to."""
        names = {self.address(target): target for target in targets}
        wanted = json.dumps([[address, port] for address in names for port in PORTS])
        place, _, short = source.partition("/")
        words = ("exec", short, "--", "python3", "-c", PROBE, wanted)
        answer = self.cluster.kubectl(*words, namespace=self.namespaces[place], timeout_s=120)
        reached: dict[str, set[int]] = {target: set() for target in targets}
        for address, port in json.loads(answer):
            reached[names[address]].add(port)
        return reached


POD_LABELS = {
    "system/operator": OPERATOR_LABELS,
    "system/neighbour": {"app": "shell"},
    "team/worker": dict(selector("llama")),
    "team/prefill": {**selector("llama"), ROLE_LABEL: Role.prefill.value},
    "team/router": dict(router_labels("llama")),
    "team/client": {"app": "shell"},
    "other/router": dict(router_labels("llama")),
    "other/impostor": OPERATOR_LABELS,
}
OPERATOR, OWN = "system/operator", ("team/worker", "team/prefill", "team/router")
TARGETS = [OPERATOR, *OWN]


def open_ports(*ports: int) -> dict[str, set[int]]:
    """Return the ports that are open to a pod: those of the operator, and these of a deployment, in one policy."""
    return {OPERATOR: {8080, 9090}, **{name: set(ports) for name in OWN}}


EXPECTED = {
    **dict.fromkeys(POD_LABELS, open_ports(8000)),
    **dict.fromkeys((OPERATOR, "team/router"), open_ports(8000, 8001)),
    **dict.fromkeys(("team/worker", "team/prefill"), open_ports(8000, 8002)),
}


@pytest.fixture(scope="module")
def pods(cluster: Cluster, local_cluster: Cluster) -> Iterator[Pods]:
    with cluster.namespace("np-sys") as system, cluster.namespace("np-a") as team, cluster.namespace("np-b") as other:
        pods = Pods(cluster, {"system": system, "team": team, "other": other})
        for name, labels in POD_LABELS.items():
            pods.apply(name, labels, cluster.operator_image)
        for namespace in pods.namespaces.values():
            flags = ("--all", "--for=condition=Ready", "--timeout=90s")
            cluster.kubectl("wait", "pod", *flags, namespace=namespace)
        yield pods


def policies(system: str, team: str) -> list[Manifest]:
    """Return the policies of the chart in one namespace, and of its operator for a deployment in another."""
    command = [HELM, "template", "sd", CHART, "--namespace", system]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    objects = {item["kind"]: item for item in yaml.safe_load_all(rendered) if item}
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    peers = read_settings({one["name"]: one.get("value", "x") for one in container["env"]}).policy_peers
    assert peers is not None
    spec = Spec.model_validate({"model": {"uri": "embedded://t"}})
    deployment = Deployment(namespace=team, name="llama", uid="u", generation=1, spec=spec, status=Status())
    made = dict(network_policy(deployment, peers))
    made["metadata"] = {name: value for name, value in made["metadata"].items() if name != "ownerReferences"}
    return [objects["NetworkPolicy"], made]


def test_each_pod_reaches_the_ports_that_it_needs_and_no_others(pods: Pods, cluster: Cluster) -> None:
    everything = {target: set(PORTS) for target in TARGETS}

    def open_to_all() -> bool:
        return pods.reached("team/client", TARGETS) == everything

    wait_for("all ports are open before", open_to_all)
    for policy in policies(pods.namespaces["system"], pods.namespaces["team"]):
        cluster.apply(policy, namespace=policy["metadata"].get("namespace", pods.namespaces["system"]))
    assert open_to_all(), "without a firewall, policies do nothing"
    subprocess.run([COMMAND, "start"], check=True, timeout=500)
    try:
        for source, expected in EXPECTED.items():
            others = [target for target in TARGETS if target != source]

            def enforced(source: str = source, others: list[str] = others, expected: dict = expected) -> bool:  # type: ignore[type-arg]
                assert (reached := pods.reached(source, others)) == {name: expected[name] for name in others}, reached
                return True

            wait_for(f"the policies hold for {source}", enforced, timeout_s=60)
    finally:
        subprocess.run([COMMAND, "stop"], check=True, timeout=60)
    wait_for("all ports are open afterwards", open_to_all)
