"""Routers through outages: the API server gone for a minute, a drained node and a lost node.

The routers and the operator run on the first node. Clients of a lost router would see one broken connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from support.cluster_faults.control_plane_faults import dead_api_server, hanging_api_server
from support.cluster_faults.extra_node import bring_back, drain, extra_node, node_command, prefer, spread
from support.e2e.endpoint import Endpoint
from support.e2e.kube import Namespace
from support.e2e.routed import Routed, routed_deployment
from support.e2e.worker_faults import kill_server, restarts, wait_for_ready_pods
from support.kube import Cluster, wait_for

pytestmark = [
    pytest.mark.timeout(1800),  # the image of workers is copied to the second node
    pytest.mark.proof("outages"),
    pytest.mark.usefixtures("local_cluster"),
]
OUTAGE_SECONDS = 60


@pytest.fixture(scope="module")
def node(local_cluster: Cluster) -> Iterator[str]:
    with extra_node([local_cluster.worker_image], timeout_s=1500) as name:
        yield name


def nodes_of(endpoint: Endpoint) -> list[str]:
    """Return the node of every worker that is not terminating."""
    return [pod["spec"]["nodeName"] for pod in endpoint.pods()]


@pytest.fixture(scope="module")
def routed(watched: Namespace) -> Iterator[Routed]:
    """Yield a deployment whose routers and workers are on the first node."""
    with routed_deployment(watched, "outage") as routed:
        yield routed


@pytest.mark.parametrize("fault", [hanging_api_server, dead_api_server], ids=["hangs", "dead"])
def test_api_server_gone_and_a_worker_killed(
    routed: Routed,
    watched: Namespace,
    fault: Callable[[], AbstractContextManager[None]],
    request: pytest.FixtureRequest,
) -> None:
    """The worker is killed by its processes; Kubernetes cannot tell the routers."""
    label = f"API server gone for 60 s ({request.node.callspec.id}), a worker killed meanwhile"
    with routed.unnoticed(label) as name:
        pod, before = watched.get("pod", name), restarts(routed.endpoint, name)
        with fault():
            time.sleep(OUTAGE_SECONDS / 4)
            kill_server(pod)
            time.sleep(OUTAGE_SECONDS * 3 / 4)
        wait_for("the worker restarted", lambda: restarts(routed.endpoint, name) > before, timeout_s=120)


def test_drained_node(watched: Namespace, cluster: Cluster, node: str) -> None:
    """All workers run on the node; the budget makes the drain wait for the replacement of the first."""
    with routed_deployment(watched, "drained", workers={"template": {"spec": prefer(node)}}) as routed:
        assert nodes_of(routed.endpoint) == [node, node]
        try:
            with routed.unnoticed("drain of the node of both workers"):
                drain(cluster, node)
                wait_for_ready_pods(routed.endpoint, 2)
                assert node not in nodes_of(routed.endpoint)
        finally:
            cluster.kubectl("uncordon", node)


def test_lost_node(watched: Namespace, node: str) -> None:
    with routed_deployment(watched, "lost", workers={"template": {"spec": spread("lost")}}) as routed:
        assert node in nodes_of(routed.endpoint)
        assert len(set(nodes_of(routed.endpoint))) == 2
        with routed.unnoticed("loss of the node of a worker"):
            node_command("kill", node)
            wait_for("the worker is not ready", lambda: len(routed.endpoint.ready_pods()) == 1, timeout_s=120)
            bring_back(node)
