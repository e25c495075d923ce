"""Constant traffic of eight clients through a drain and a loss of the second node, with direct access to workers."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest
from localcluster.settings import NODE_ADDRESS

from support.cluster_faults.extra_node import bring_back, drain, extra_node, node_command, prefer, spread
from support.e2e.traffic import chat_body
from support.kube import Cluster, wait_for
from support.operator_faults.client_traffic import DRAIN, assert_status_true, constant_clients, unnoticed
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import ServedDeployment, Tenant
from support.tiers import skip_reason

pytestmark = pytest.mark.timeout(600)
LOSS_NOTICED_SECONDS = 120
ENDED_SECONDS = 25
"""Time-out of a request (20 s), and time for kube-proxy to follow the EndpointSlice."""


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[str]:
    if not cluster.local:
        pytest.skip(skip_reason("local cluster", "it gets a second node"))
    with extra_node([cluster.operator_image]) as name:
        yield name


def nodes_of(served: ServedDeployment) -> list[str]:
    """Return the node of every ready worker."""
    return [pod["spec"]["nodeName"] for pod in served.pods()]


def ask_from(address: str, served: ServedDeployment) -> httpx.Response:
    """Ask from a source address of its own.

    For two minutes the kernel would send a connection from a port of one that waited for the lost worker to that worker
    again, whatever kube-proxy says.
    """
    url = f"http://{served.child('service')['spec']['clusterIP']}/v1/chat/completions"
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=10) as client:
        return client.post(url, json=chat_body("stand-in", "hello", 64))


def test_drained_node(tenant: Tenant, cluster: Cluster, node: str, figures: Figures) -> None:
    """All workers run on the node; the budget makes the drain wait for the replacement of the first."""
    with tenant.deployment("drained", replicas=2, drain=DRAIN, pod=prefer(node)) as served:
        assert nodes_of(served) == [node, node]
        try:
            with unnoticed(served, figures, "node drained"):
                began = time.monotonic()
                drain(cluster, node)
                figures.record("traffic", "node drained: seconds", time.monotonic() - began)
                served.wait_running(2)
                assert node not in nodes_of(served)
                assert_status_true(served, figures, "node drained")
        finally:
            cluster.kubectl("uncordon", node)


def test_lost_node(tenant: Tenant, node: str, figures: Figures) -> None:
    """Requests fail until the cluster has noticed the loss: kube-proxy sends every second one to the lost worker."""
    label = "node lost"
    with tenant.deployment("lost", replicas=2, drain=DRAIN, pod=spread("lost")) as served:
        assert node in nodes_of(served)
        assert len(set(nodes_of(served))) == 2
        with constant_clients(served) as clients:
            node_command("kill", node)
            killed = time.monotonic()
            wait_for("the worker is not ready", lambda: len(served.pods()) == 1, timeout_s=LOSS_NOTICED_SECONDS)
            figures.record("traffic", f"{label}: seconds until its worker is not ready", time.monotonic() - killed)
            time.sleep(ENDED_SECONDS)  # requests that were sent before end with a time-out
            noticed = len(clients.failures)
            assert served.is_condition("Available", "True")
        for _ in range(100):
            assert ask_from(NODE_ADDRESS, served).status_code == 200
        figures.record("traffic", f"{label}: failed of requests", f"{noticed} of {clients.answered + noticed}")
        bring_back(node)
        served.wait_running(2)
        assert_status_true(served, figures, label)
