"""Pins, pauses, Advisory and `kubectl specdecode` on a real API server: what is written, and what is left alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from fleet import DEFAULTS, SPEC, deep
from kube import Cluster as Kubectl
from kube import KubectlError, wait_for

from specdecode_operator.api import crd
from specdecode_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION
from specdecode_operator.controller.reconciler import Reconciler
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.plugin.cli import main
from specdecode_operator.state.store import StateStore
from specdecode_operator.telemetry.worker_client import WorkerClient

pytestmark = pytest.mark.cluster
CHILDREN = "deployments,services,poddisruptionbudgets,configmaps"


class Made:
    """One deployment without pods, reconciled on demand."""

    def __init__(self, cluster: Kubectl, api: KubeClient, namespace: str, name: str, **spec: Any) -> None:
        self.cluster, self.api, self.namespace, self.name = cluster, api, namespace, name
        self.reconciler = Reconciler(api, WorkerClient(), StateStore(api), DEFAULTS, poll_seconds=5)
        document = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {"name": name},
            "spec": json.loads(json.dumps(deep({**SPEC, "replicas": 0}, spec))),
        }
        cluster.apply(document, namespace=namespace)

    async def looked(self, times: int = 1) -> None:
        """Applies every child anew, as after the minute in which equal text is not sent again."""
        for _ in range(times):
            for suffix in ("", "-worker", "-plan", "-state"):
                self.api.forget(self.namespace, self.name + suffix)
            await self.reconciler.handle((self.namespace, self.name))

    def annotate(self, text: str) -> None:
        self.cluster.kubectl("annotate", "sdd", self.name, text, "--overwrite", namespace=self.namespace)

    def plan(self) -> dict[str, Any]:
        found = self.cluster.get("configmap", f"{self.name}-plan", self.namespace)
        return json.loads(found["data"]["plan.json"])  # type: ignore[no-any-return]

    def condition(self, kind: str) -> dict[str, Any]:
        status = self.cluster.get("sdd", self.name, self.namespace)["status"]
        return next((found for found in status["conditions"] if found["type"] == kind), {"status": "absent"})

    def events(self) -> list[tuple[str, str]]:
        found = self.cluster.list("events", "", self.namespace)
        return [(one["reason"], one["message"]) for one in found if one["involvedObject"]["name"] == self.name]

    def versions(self) -> dict[str, str]:
        """resourceVersion of every child but the operator's own memory."""
        found = self.cluster.list(CHILDREN, f"{GROUP}/name={self.name}", self.namespace)
        return {
            f"{child['kind']}/{child['metadata']['name']}": child["metadata"]["resourceVersion"]
            for child in found
            if child["metadata"]["name"] != f"{self.name}-state"
        }

    def settled(self) -> dict[str, str]:
        """``versions`` once Kubernetes' own controllers have written their status into the children."""
        seen: list[dict[str, str]] = [{}]

        def same() -> dict[str, str] | None:
            seen.append(self.versions())
            return seen[-1] if seen[-1] and seen[-1] == seen[-2] else None

        return wait_for("the children are settled", same, timeout_s=30, every_s=2) or {}

    def plugin(self, *words: str) -> int:
        command, *rest = words
        flags = ["--kubeconfig", self.cluster.kubeconfig] if self.cluster.kubeconfig else []
        return main([command, *flags, "--namespace", self.namespace, *rest])


@pytest.fixture(scope="module")
def kind_is_known(cluster: Kubectl) -> None:
    try:
        cluster.get("crd", f"{PLURAL}.{GROUP}")
    except KubectlError:
        cluster.apply(yaml.safe_load(crd.text()))
    wait_for("our kind is served", lambda: cluster.kubectl("get", PLURAL, "--all-namespaces") is not None)


@pytest.fixture
async def api(cluster: Kubectl, kind_is_known: None) -> AsyncIterator[KubeClient]:
    connection = await KubeClient.connect(cluster.kubeconfig)
    yield connection
    await connection.close()


async def test_a_pin_becomes_the_plan_and_goes_again(api: KubeClient, cluster: Kubectl, namespace: str) -> None:
    made = Made(cluster, api, namespace, "pinned")
    await made.looked(2)
    before = made.plan()
    made.annotate("specdecode.io/pin=chain:2")
    await made.looked()
    assert made.plan()["initial"] == [0, 1]
    assert made.plan()["version"] > before["version"]
    assert made.condition("Pinned")["status"] == "True"
    assert ("SteeringChanged", "every load: mode Auto -> pin chain:2: annotation specdecode.io/pin") in made.events()
    made.annotate("specdecode.io/pin-")
    await made.looked()
    assert made.plan()["initial"] == before["initial"]
    assert made.condition("Pinned")["status"] == "absent"


async def test_a_slip_changes_nothing_and_is_told_once(api: KubeClient, cluster: Kubectl, namespace: str) -> None:
    made = Made(cluster, api, namespace, "slip")
    await made.looked(2)
    before = made.settled()
    made.annotate("specdecode.io/pin=chian:2")
    await made.looked(3)
    assert made.versions() == before
    assert made.condition("Pinned")["reason"] == "BadPin"
    told = [message for reason, message in made.events() if reason == "BadPin"]
    assert len(told) == 1
    assert "write chain:3" in told[0]


async def test_a_pause_leaves_every_child_alone(api: KubeClient, cluster: Kubectl, namespace: str) -> None:
    made = Made(cluster, api, namespace, "paused")
    await made.looked(2)
    before = made.settled()
    made.annotate("specdecode.io/paused=true")
    change = json.dumps({"spec": {"drain": {"gracePeriodSeconds": 77}, "speculation": {"mode": "Off"}}})
    cluster.kubectl("patch", "sdd", made.name, "--type=merge", "-p", change, namespace=namespace)
    await made.looked(2)
    assert made.versions() == before
    assert made.condition("Progressing")["reason"] == "Paused"
    made.annotate("specdecode.io/paused-")
    await made.looked()
    assert made.versions() != before


async def test_advisory_leaves_the_resource_versions_of_all_children(
    api: KubeClient, cluster: Kubectl, namespace: str
) -> None:
    made = Made(cluster, api, namespace, "advised", speculation={"mode": "Advisory"})
    await made.looked(2)
    before = made.settled()
    await made.looked(3)
    assert made.versions() == before


async def test_the_plugin_on_a_real_api_server(
    api: KubeClient, cluster: Kubectl, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(cluster, api, namespace, "plugged")
    await made.looked(2)
    assert made.plugin("pin", "plugged", "chain:4") == 0
    await made.looked()
    assert made.plan()["initial"] == [0, 1, 2, 3]
    assert made.plugin("status") == 0
    assert made.plugin("explain", "plugged") == 0
    assert made.plugin("history", "plugged") == 0
    out = capsys.readouterr().out
    assert "Pin chain:4" in out
    assert "It is pinned: chain:4" in out
    assert "mode Auto" in out
    assert made.plugin("unpin", "plugged") == 0
    await made.looked()
    assert made.plan()["initial"] != [0, 1, 2, 3]
    assert made.plugin("pin", "plugged", "sql=chain:4") == 1
    assert made.plugin("explain", "absent") == 1
    assert '"absent" not found' in capsys.readouterr().err
