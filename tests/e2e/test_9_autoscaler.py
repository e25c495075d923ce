"""A HorizontalPodAutoscaler on the resource, fed by metrics-server; the operator follows its replica count."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from support.e2e.endpoint import MODEL, Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import PROOF, deployed
from support.e2e.release import Release
from support.e2e.traffic import Traffic
from support.kube import ROOT, Cluster, Manifest, wait_for

pytestmark = [PROOF, pytest.mark.timeout(900)]

NAME = "external"
ALWAYS_ONE: Manifest = {"owner": "External", "minReplicas": 1, "maxReplicas": 1}
"""Replica bounds of the operator.

An operator that used them instead of the autoscaler's count would stay at one replica.
"""
AUTOSCALER: Manifest = {
    "apiVersion": "autoscaling/v2",
    "kind": "HorizontalPodAutoscaler",
    "metadata": {"name": NAME},
    "spec": {
        "scaleTargetRef": {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDeployment", "name": NAME},
        "minReplicas": 1,
        "maxReplicas": 2,
        "metrics": [
            {
                "type": "Resource",
                "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 200}},
            }
        ],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
    },
}


@pytest.fixture(scope="module")
def metrics(cluster: Cluster) -> None:
    """Ensure that the metrics API is available. On the local cluster this installs metrics-server."""
    if cluster.local:
        subprocess.run([ROOT / "hack" / "cluster" / "metrics-server"], check=True, timeout=900)
    cluster.kubectl("top", "node")


@pytest.fixture
def endpoint(release: Release, watched: Namespace, metrics: None) -> Iterator[Endpoint]:
    release.start()
    with deployed(watched, NAME, {}, {}, scaling=ALWAYS_ONE) as endpoint:
        watched.apply(AUTOSCALER)
        yield endpoint
        watched.kubectl("delete", "hpa", NAME)


def conditions(endpoint: Endpoint) -> dict[str, str]:
    hpa_status = endpoint.namespace.get("hpa", NAME).get("status", {})
    return {condition["type"]: condition["status"] for condition in hpa_status.get("conditions", [])}


def test_autoscaler_changes_the_replicas(endpoint: Endpoint) -> None:
    with (
        endpoint.namespace.reach("service", endpoint.name, 80) as url,
        Traffic(url, MODEL, concurrency=4) as traffic,
    ):
        wait_for("ScalingActive", lambda: conditions(endpoint).get("ScalingActive") == "True", timeout_s=180, every_s=2)
        wait_for("spec.replicas is set", lambda: endpoint.get()["spec"]["replicas"] == 2, timeout_s=120, every_s=2)
        wait_for("two workers", lambda: len(endpoint.ready_pods()) == 2, timeout_s=120, every_s=2)
        wait_for("status counts them", lambda: endpoint.status()["readyReplicas"] == 2, timeout_s=30)
    assert not traffic.failures
    wait_for("one worker again", lambda: len(endpoint.pods()) == 1, timeout_s=240, every_s=2)
    assert endpoint.get()["spec"]["replicas"] == 1
    assert endpoint.condition("ScalingLimited")["status"] == "absent", "the operator scales nothing here"
