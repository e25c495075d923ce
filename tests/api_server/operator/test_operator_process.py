"""The real operator process against a real API server: children, refusals, plugin, cut connections, two replicas."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator import manifests
from specdecode_operator.api.v1alpha1 import GROUP, KIND
from specdecode_operator.kube.kinds import OWN_NAMESPACE_PERMISSIONS, PERMISSIONS
from specdecode_operator.plugin.cli import main
from support.kube import Cluster, KubectlError, wait_for
from support.operators.fleet import DEFAULTS, RUN, deployment_with
from support.operators.kube_objects import resource, without_owner
from support.operators.operator_process import OperatorProcess, grant, kubeconfig_of
from support.operators.tcp_proxy import TcpProxy

pytestmark = pytest.mark.usefixtures("crd")
MAX_MEMORY_MIB = 120
CHILDREN = "deploy,cm,svc,pdb,netpol"


def make(cluster: Cluster, namespace: str, name: str) -> None:
    """Create a resource, and wait until its workload exists."""
    cluster.apply(resource(name), namespace=namespace)
    wait_for("the workload", lambda: cluster.get("deploy", f"{name}-worker", namespace), timeout_s=30)


def conditions(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    status = cluster.get("sdd", name, namespace).get("status", {})
    return {condition["type"]: condition for condition in status.get("conditions", [])}


def test_a_resource_gets_children_and_a_status_that_stays_the_same(
    operator: OperatorProcess, cluster: Cluster, namespace: str
) -> None:
    make(cluster, namespace, "made")
    made = wait_for(
        "its status", lambda: s if (s := cluster.get("sdd", "made", namespace)).get("status") else None, timeout_s=30
    )
    assert "finalizers" not in made["metadata"]
    assert made["status"]["observedGeneration"] == 1
    assert made["status"]["url"] == f"http://made.{namespace}.svc/v1"
    token = cluster.get("secret", "made-tokens", namespace)["data"]
    assert set(token) == {"operator", "router", "capture"}

    def versions() -> dict[str, str]:
        children = cluster.list(f"sdd,{CHILDREN}", "", namespace)
        return {
            f"{child['kind']}/{child['metadata']['name']}": child["metadata"]["resourceVersion"] for child in children
        }

    def are_settled() -> bool:
        before = versions()
        time.sleep(3)
        return versions() == before

    wait_for("the first writes are over", are_settled, timeout_s=40, every_s=0)
    settled = versions()
    time.sleep(8)
    assert versions() == settled, "a deployment at rest is written"
    assert cluster.get("secret", "made-tokens", namespace)["data"] == token


def test_a_policy_is_made_for_each_deployment_and_deleted_once_policies_are_off(
    crd: None, cluster: Cluster, tmp_path: Path
) -> None:
    with cluster.namespace("policy") as own:
        cluster.apply(resource("made"), namespace=own)
        with OperatorProcess(cluster, own, tmp_path, policy_peers="{}"):
            policy = wait_for("the policy", lambda: cluster.get("netpol", "made", own), timeout_s=30)
            assert policy["metadata"]["ownerReferences"][0]["kind"] == KIND
            cluster.kubectl("delete", "netpol", "made", "--wait=false", namespace=own)
            wait_for("it is back", lambda: cluster.list("netpol", f"{GROUP}/name=made", own), timeout_s=10)
        with OperatorProcess(cluster, own, tmp_path):
            wait_for("it is gone", lambda: not cluster.list("netpol", f"{GROUP}/name=made", own), timeout_s=30)
            assert cluster.get("deploy", "made-worker", own)


def test_an_operator_is_ready_once_it_has_its_rights(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    lacking = {**PERMISSIONS, ("", "services"): frozenset({"get", "list", "watch", "patch"})}
    grant(cluster, namespace, "probed", {**lacking, ("", "pods"): frozenset({"patch"})}, OWN_NAMESPACE_PERMISSIONS)
    kubeconfig = kubeconfig_of(cluster, namespace, "probed", tmp_path)
    with OperatorProcess(cluster, namespace, tmp_path, kubeconfig=kubeconfig) as process:
        wait_for(
            "the refused list", lambda: "list of Pod: pods is forbidden" in process.probe("/ready")[1], timeout_s=60
        )
        assert process.probe("/healthz") == (200, "ok\n")
        assert process.probe("/ready")[0] == 503
        grant(cluster, namespace, "probed", lacking, OWN_NAMESPACE_PERMISSIONS)
        missing = f"rights in {namespace}: create services missing; see the chart's rbac.yaml\n"
        wait_for("the missing right", lambda: process.probe("/ready") == (503, missing), timeout_s=60)
        grant(cluster, namespace, "probed", PERMISSIONS, OWN_NAMESPACE_PERMISSIONS)
        wait_for("it is ready", lambda: process.probe("/ready") == (200, "ok\n"), timeout_s=30)


def test_a_refused_child_is_named_and_the_others_are_applied(
    operator: OperatorProcess, cluster: Cluster, namespace: str
) -> None:
    bad = {"workers": {"template": {"spec": {"containers": [{"name": "worker", "image": ""}], "restartPolicy": "No"}}}}
    cluster.apply(resource("refused", **bad), namespace=namespace)
    stalled = wait_for("the condition", lambda: conditions(cluster, namespace, "refused").get("Stalled"), timeout_s=30)
    assert "refused-worker" in stalled["message"]
    assert "restartPolicy" in stalled["message"]
    assert conditions(cluster, namespace, "refused")["Ready"]["status"] == "False"
    assert cluster.get("svc", "refused", namespace)
    with pytest.raises(KubectlError, match="not found"):
        cluster.get("deploy", "refused-worker", namespace)


def test_the_plugin_reads_and_pins(
    operator: OperatorProcess, cluster: Cluster, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*(["--kubeconfig", cluster.kubeconfig] if cluster.kubeconfig else []), "--namespace", namespace]

    def plan() -> Any:
        return json.loads(cluster.get("cm", "plugged-plan", namespace)["data"]["plan.json"])["initial"]

    def is_event() -> bool:
        events = cluster.list("events", "", namespace)
        words = "every load: mode Auto -> pin chain:4: spec.speculation.pin"
        return ("SteeringChanged", words) in [(one["reason"], one["message"]) for one in events]

    cluster.apply(resource("plugged"), namespace=namespace)
    before = wait_for("the first plan", plan, timeout_s=30)
    assert main(["pin", *flags, "plugged", "chain:4"]) == 0
    wait_for("the pinned plan", lambda: plan() == [0, 1, 2, 3], timeout_s=20)
    wait_for("the condition", lambda: conditions(cluster, namespace, "plugged")["Pinned"]["status"] == "True")
    wait_for("the Event", is_event, timeout_s=20)
    assert main(["explain", *flags, "plugged"]) == 0
    assert main(["history", *flags, "plugged"]) == 0
    out = capsys.readouterr().out
    assert "chain:4" in out
    assert "mode Auto" in out
    assert main(["unpin", *flags, "plugged"]) == 0
    wait_for("the former plan", lambda: plan() == before, timeout_s=20)
    wait_for("no condition", lambda: "Pinned" not in conditions(cluster, namespace, "plugged"), timeout_s=20)
    assert main(["pin", *flags, "plugged", "sql=chain:4"]) == 1
    assert main(["explain", *flags, "absent"]) == 1
    assert '"absent" not found' in capsys.readouterr().err


# --- cut connections --------------------------------------------------------------------------------------------------


@pytest.fixture
def own_namespace(cluster: Cluster) -> Iterator[str]:
    """Yield a namespace that no other operator serves."""
    with cluster.namespace("process") as name:
        yield name


def grace(cluster: Cluster, namespace: str, name: str) -> int:
    workload = cluster.get("deploy", f"{name}-worker", namespace)
    return int(workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])


def change_grace(cluster: Cluster, namespace: str, name: str, seconds: int) -> None:
    change = json.dumps({"spec": {"drain": {"gracePeriod": f"{seconds}s"}}})
    cluster.kubectl("patch", "sdd", name, "--type=merge", "-p", change, namespace=namespace)


def test_the_operator_survives_a_connection_loss_to_the_api_server(
    proxy: TcpProxy, proxied_kubeconfig: Path, cluster: Cluster, own_namespace: str, tmp_path: Path
) -> None:
    with OperatorProcess(cluster, own_namespace, tmp_path, kubeconfig=proxied_kubeconfig) as operator:
        make(cluster, own_namespace, "cut")
        proxy.cut()
        change_grace(cluster, own_namespace, "cut", 77)
        time.sleep(8)
        assert grace(cluster, own_namespace, "cut") != 92, "no change while it is cut off"
        assert operator.process.poll() is None, "the operator died with its API server"
        proxy.mend()
        wait_for("the change is applied", lambda: grace(cluster, own_namespace, "cut") == 92, timeout_s=30)
        make(cluster, own_namespace, "after")
        assert operator.resident_mib() <= MAX_MEMORY_MIB


def test_the_operator_waits_for_an_api_server_that_starts_later(
    proxy: TcpProxy, proxied_kubeconfig: Path, cluster: Cluster, own_namespace: str, tmp_path: Path
) -> None:
    proxy.cut()
    with OperatorProcess(cluster, own_namespace, tmp_path, kubeconfig=proxied_kubeconfig) as operator:
        with pytest.raises(subprocess.TimeoutExpired):
            operator.process.wait(timeout=6)
        proxy.mend()
        cluster.apply(resource("early"), namespace=own_namespace)
        wait_for("the workload", lambda: cluster.get("deploy", "early-worker", own_namespace), timeout_s=90)


# --- two replicas -----------------------------------------------------------------------------------------------------


def test_two_replicas_elect_a_leader_and_hand_over_without_a_new_plan(
    cluster: Cluster, own_namespace: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        replicas = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            operator = OperatorProcess(
                cluster, own_namespace, tmp_path / name, leader_election="true", identity=name, lease_name="operator"
            )
            replicas.append(stack.enter_context(operator))

        def leader() -> str:
            return str(cluster.get("lease", "operator", own_namespace)["spec"]["holderIdentity"])[:1]

        first = wait_for("a leader", leader, timeout_s=30)
        make(cluster, own_namespace, "led")
        wait_for("its status", lambda: cluster.get("sdd", "led", own_namespace).get("status"), timeout_s=30)
        time.sleep(3)
        plan = cluster.get("cm", "led-plan", own_namespace)["metadata"]["resourceVersion"]
        killed = replicas["ab".index(first)]
        killed.kill()
        began = time.monotonic()
        wait_for("the other one leads", lambda: leader() not in ("", first), timeout_s=20)
        change_grace(cluster, own_namespace, "led", 77)
        wait_for("it applies a change", lambda: grace(cluster, own_namespace, "led") == 92, timeout_s=20)
        assert time.monotonic() - began < 30
        assert cluster.get("cm", "led-plan", own_namespace)["metadata"]["resourceVersion"] == plan


# --- children that tests/e2e/test_0_core.py has not: Jobs, and routers with keys and certificates ---------------------


def test_an_operator_with_the_charts_rights_creates_jobs_and_routers(cluster: Cluster, own_namespace: str) -> None:
    account = grant(cluster, own_namespace, "operator", PERMISSIONS)
    spec: dict[str, Any] = {
        "distillation": {"storage": {"uri": "pvc://drafts"}},
        "router": {"replicas": 2, "template": {"spec": {"nodeSelector": {"pool": "cpu"}}}},
        "apiKeysSecretRef": {"name": "keys"},
        "tlsSecretRef": {"name": "cert"},
    }
    deployment = replace(deployment_with(**spec), namespace=own_namespace)
    for child in (
        manifests.distillation_job(deployment, RUN, DEFAULTS, ("0123456789abcdef",)),
        manifests.deletion_job(deployment, RUN, DEFAULTS),
        manifests.router_workload(deployment, DEFAULTS),
    ):
        body = json.dumps(without_owner(child))
        assert "created" in cluster.kubectl("create", account, "--dry-run=server", "-f", "-", stdin=body)
