"""Pins, pauses, Advisory and `kubectl specdecode` with a running operator: what is written, and what is left alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import GROUP, KIND, VERSION
from specdecode_operator.plugin.cli import main
from support.kube import Cluster, wait_for
from support.operators.fleet import SPEC, deep
from support.operators.operator_process import OperatorProcess, install_crd

CHILDREN = "deployments,services,poddisruptionbudgets,configmaps"
TWO_ROUNDS_SECONDS = 4.0


class Made:
    """One deployment without pods, served by a running operator."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, **spec: Any) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name
        document = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {"name": name},
            "spec": json.loads(json.dumps(deep({**SPEC, "replicas": 0}, spec))),
        }
        cluster.apply(document, namespace=namespace)
        wait_for("the first plan", self.plan, timeout_s=30)

    def change(self, **spec: Any) -> None:
        """Merge a change into the spec; None removes a field."""
        patch = json.dumps({"spec": spec})
        self.cluster.kubectl("patch", "sdd", self.name, "--type=merge", "-p", patch, namespace=self.namespace)

    def plan(self) -> dict[str, Any]:
        config_map = self.cluster.get("configmap", f"{self.name}-plan", self.namespace)
        return json.loads(config_map["data"]["plan.json"])  # type: ignore[no-any-return]

    def condition(self, kind: str) -> dict[str, Any]:
        status = self.cluster.get("sdd", self.name, self.namespace).get("status", {})
        return next((item for item in status.get("conditions", []) if item["type"] == kind), {"status": "absent"})

    def reasons(self) -> set[str]:
        """Return the reasons of all conditions."""
        status = self.cluster.get("sdd", self.name, self.namespace).get("status", {})
        return {condition["reason"] for condition in status.get("conditions", [])}

    def events(self) -> list[tuple[str, str]]:
        events = self.cluster.list("events", "", self.namespace)
        return [(one["reason"], one["message"]) for one in events if one["involvedObject"]["name"] == self.name]

    def versions(self) -> dict[str, str]:
        """Return the resourceVersion of every child except the stored state."""
        children = self.cluster.list(CHILDREN, f"{GROUP}/name={self.name}", self.namespace)
        return {
            f"{child['kind']}/{child['metadata']['name']}": child["metadata"]["resourceVersion"]
            for child in children
            if child["metadata"]["name"] != f"{self.name}-state"
        }

    def settled(self) -> dict[str, str]:
        """Return ``versions`` once the controllers of Kubernetes have written their status into the children."""
        seen: list[dict[str, str]] = [{}]

        def same() -> dict[str, str] | None:
            seen.append(self.versions())
            return seen[-1] if seen[-1] and seen[-1] == seen[-2] else None

        return wait_for("the children are settled", same, timeout_s=30, every_s=2) or {}

    def plugin(self, *words: str) -> int:
        command, *rest = words
        flags = ["--kubeconfig", self.cluster.kubeconfig] if self.cluster.kubeconfig else []
        return main([command, *flags, "--namespace", self.namespace, *rest])


@pytest.fixture(scope="module", autouse=True)
def running(cluster: Cluster, namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    install_crd(cluster)
    folder: Path = tmp_path_factory.mktemp("operator")
    with OperatorProcess(cluster, namespace, folder) as process:
        yield process


def test_a_pin_becomes_the_plan_until_it_is_removed(cluster: Cluster, namespace: str) -> None:
    made = Made(cluster, namespace, "pinned")
    before = made.plan()
    made.change(speculation={"pin": "chain:2"})
    wait_for("the pinned plan", lambda: made.plan()["initial"] == [0, 1], timeout_s=20)
    assert made.plan()["version"] > before["version"]
    wait_for("the condition", lambda: made.condition("Pinned")["status"] == "True", timeout_s=20)
    event = ("SteeringChanged", "every load: mode Auto -> pin chain:2: spec.speculation.pin")
    wait_for("the Event", lambda: event in made.events(), timeout_s=20)
    made.change(speculation={"pin": None})
    wait_for("the former plan", lambda: made.plan()["initial"] == before["initial"], timeout_s=20)
    wait_for("no condition", lambda: made.condition("Pinned")["status"] == "absent", timeout_s=20)


def test_a_pin_that_cannot_run_changes_nothing_and_is_reported_once(cluster: Cluster, namespace: str) -> None:
    made = Made(cluster, namespace, "slip")
    before = made.settled()
    made.change(speculation={"pin": "chain:17"})
    wait_for("the condition", lambda: made.condition("Pinned").get("reason") == "BadPin", timeout_s=20)
    time.sleep(TWO_ROUNDS_SECONDS)
    assert made.versions() == before
    messages = [message for reason, message in made.events() if reason == "BadPin"]
    assert len(messages) == 1
    assert "at most 16 can be run" in messages[0]


def test_a_pause_leaves_every_child_alone(cluster: Cluster, namespace: str) -> None:
    made = Made(cluster, namespace, "paused")
    before = made.settled()
    made.change(paused=True, drain={"gracePeriod": "77s"}, speculation={"mode": "Off"})
    wait_for("the status says it", lambda: "Paused" in made.reasons(), timeout_s=20)
    time.sleep(TWO_ROUNDS_SECONDS)
    assert made.versions() == before
    made.change(paused=None)
    wait_for("the change is applied", lambda: made.versions() != before, timeout_s=20)


def test_advisory_leaves_the_resource_versions_of_all_children(cluster: Cluster, namespace: str) -> None:
    made = Made(cluster, namespace, "advised", speculation={"mode": "Advisory"})
    before = made.settled()
    time.sleep(TWO_ROUNDS_SECONDS)
    assert made.versions() == before


def test_the_plugin_reads_and_pins_on_a_real_api_server(
    cluster: Cluster, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(cluster, namespace, "plugged")
    assert made.plugin("pin", "plugged", "chain:4") == 0
    wait_for("the pinned plan", lambda: made.plan()["initial"] == [0, 1, 2, 3], timeout_s=20)
    wait_for("the condition", lambda: made.condition("Pinned")["status"] == "True", timeout_s=20)
    assert made.plugin("explain", "plugged") == 0
    assert made.plugin("history", "plugged") == 0
    out = capsys.readouterr().out
    assert "chain:4" in out
    assert "mode Auto" in out
    assert made.plugin("unpin", "plugged") == 0
    wait_for("the former plan", lambda: made.plan()["initial"] != [0, 1, 2, 3], timeout_s=20)
    assert made.plugin("pin", "plugged", "sql=chain:4") == 1
    assert made.plugin("explain", "absent") == 1
    assert '"absent" not found' in capsys.readouterr().err
