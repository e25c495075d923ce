"""Rows 9 and 12: replicas that no node can take, and a rollout on a full node."""

from __future__ import annotations

import pytest

from support.cluster_faults.node_resource import node_resource
from support.kube import Cluster, wait_for
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import ServedDeployment, Tenant

WINDOW_SECONDS = 5
ACCELERATOR = "example.com/specdecode-faults", 1
"""Resource of the node, and its units."""


def wanted(served: ServedDeployment) -> int:
    """Return the replicas of the child Deployment."""
    return int(served.workload()["spec"]["replicas"])


@pytest.mark.timeout(400)
def test_scale_down_follows_a_scale_up_that_no_node_can_take(
    cluster: Cluster, tenant: Tenant, figures: Figures
) -> None:
    scaling = {"owner": "Operator", "minReplicas": 1, "maxReplicas": 3, "scaleDownWindow": f"{WINDOW_SECONDS}s"}
    with (
        node_resource(cluster, *ACCELERATOR),
        tenant.deployment("unplaced", accelerator=ACCELERATOR, scaling=scaling) as served,
    ):
        (worker,) = served.pods()
        served.behave(worker, running=12)
        wait_for("scaled up", lambda: wanted(served) == 3, timeout_s=60)
        wait_for("two pods are pending", lambda: len(served.all_pods()) == 3, timeout_s=30)
        served.behave(worker, running=0)
        # The mean of a minute counts before a worker is removed.
        name = "seconds to scale down past pending workers"
        figures.record_seconds(9, name, lambda: wanted(served) == 1, limit_s=120)
        assert [pod["metadata"]["name"] for pod in served.pods()] == [worker["metadata"]["name"]], "it keeps serving"


@pytest.mark.timeout(300)
def test_rollout_finishes_on_a_full_node(cluster: Cluster, tenant: Tenant, figures: Figures) -> None:
    """The node has one unit and the worker holds it; the default rollout must end nevertheless."""
    with (
        node_resource(cluster, *ACCELERATOR),
        tenant.deployment("full", accelerator=ACCELERATOR) as served,
    ):
        (before,) = served.pods()
        seconds = served.seconds_to_mark("rolled", timeout_s=15)
        figures.record(12, "seconds until the child has the new template", seconds)

        def rolled() -> bool:
            pods = served.pods()
            assert [pod["metadata"]["uid"] != before["metadata"]["uid"] for pod in pods] == [True], "old or no worker"
            return True

        figures.record_seconds(12, "the new worker runs on a full node", rolled, limit_s=60)
        wait_for("Ready", lambda: served.is_condition("Ready", "True"), timeout_s=30)
