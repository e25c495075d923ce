"""Rows 9, 10 and 12: replicas that no node can take, a change of their owner, and a rollout on a full node."""

from __future__ import annotations

import time

import pytest

from support.kube import wait_for
from support.operator_faults.figures import Figures
from support.operator_faults.node_resource import node_resource
from support.operator_faults.tenant import ServedDeployment, Tenant

WINDOW_SECONDS = 5
HOLD_SECONDS = 15


def wanted(served: ServedDeployment) -> int:
    """Return the replicas of the child Deployment."""
    return int(served.workload()["spec"]["replicas"])


@pytest.mark.timeout(400)
def test_scale_down_follows_a_scale_up_that_no_node_can_take(tenant: Tenant, figures: Figures) -> None:
    scaling = {"owner": "Operator", "minReplicas": 1, "maxReplicas": 3, "scaleDownWindow": f"{WINDOW_SECONDS}s"}
    with (
        node_resource(tenant.api, 1) as resource,
        tenant.deployment("unplaced", accelerator=(resource, 1), scaling=scaling) as served,
    ):
        (worker,) = served.pods()
        served.behave(worker, running=12)
        wait_for("scaled up", lambda: wanted(served) == 3, timeout_s=60)
        wait_for("two pods are pending", lambda: len(served.all_pods()) == 3, timeout_s=30)
        served.behave(worker, running=0)
        started = time.monotonic()
        try:
            # The mean of a minute counts before a worker is removed.
            wait_for("scaled down", lambda: wanted(served) == 1, timeout_s=120)
            figures.record(9, "seconds to scale down past pending workers", time.monotonic() - started)
        except AssertionError:
            figures.record(9, "seconds to scale down past pending workers", "not within 120")
            raise
        assert [pod["metadata"]["name"] for pod in served.pods()] == [worker["metadata"]["name"]], "it keeps serving"


def held_replicas(served: ServedDeployment, seconds: float = HOLD_SECONDS) -> set[int]:
    """Return every value that the child Deployment's replicas have within some seconds."""
    deadline, values = time.monotonic() + seconds, set()
    while time.monotonic() < deadline:
        values.add(wanted(served))
        time.sleep(0.3)
    return values


@pytest.mark.timeout(300)
def test_running_workers_stay_when_the_operator_hands_replicas_over(tenant: Tenant, figures: Figures) -> None:
    scaling = {"owner": "Operator", "minReplicas": 4, "maxReplicas": 6}
    with tenant.deployment("handed", ready=False, scaling=scaling) as served:
        served.wait_running(4)
        served.patch({"scaling": {"owner": "External", "minReplicas": 1}})
        values = held_replicas(served)
        figures.record(10, "replicas after Operator -> External with 4 running", str(sorted(values)))
        assert values == {4}


@pytest.mark.timeout(300)
def test_running_workers_stay_when_the_operator_takes_replicas_over(tenant: Tenant, figures: Figures) -> None:
    """Start from the number that runs, which an earlier Operator phase must not override."""
    operator = {"owner": "Operator", "minReplicas": 1, "maxReplicas": 6}
    with tenant.deployment("taken", scaling=operator) as served:
        served.patch({"scaling": {"owner": "External"}})
        served.patch({"replicas": 4})
        served.wait_running(4)
        served.patch({"scaling": {"owner": "Operator"}})
        values = held_replicas(served)
        figures.record(10, "replicas after External -> Operator with 4 running", str(sorted(values)))
        assert values == {4}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("running", [4, 1])
def test_running_workers_stay_when_scaling_is_added(tenant: Tenant, figures: Figures, running: int) -> None:
    with tenant.deployment("added", replicas=running) as served:
        served.patch({"scaling": {"owner": "Operator", "minReplicas": 1, "maxReplicas": 6}})
        values = held_replicas(served)
        figures.record(10, f"replicas after scaling was added with {running} running", str(sorted(values)))
        assert values == {running}


@pytest.mark.timeout(300)
def test_rollout_finishes_on_a_full_node(tenant: Tenant, figures: Figures) -> None:
    """The node has one unit and the worker holds it; the default rollout must end nevertheless."""
    with (
        node_resource(tenant.api, 1) as resource,
        tenant.deployment("full", accelerator=(resource, 1)) as served,
    ):
        (before,) = served.pods()
        seconds = served.seconds_to_mark("rolled", timeout_s=15)
        figures.record(12, "seconds until the child has the new template", seconds)
        started = time.monotonic()

        def rolled() -> bool:
            pods = served.pods()
            assert [pod["metadata"]["uid"] != before["metadata"]["uid"] for pod in pods] == [True], "old or no worker"
            return True

        try:
            wait_for("the new worker runs", rolled, timeout_s=60)
        except AssertionError:
            figures.record(12, "seconds to roll out on a full node", "not within 60")
            raise
        figures.record(12, "seconds to roll out on a full node", time.monotonic() - started)
        wait_for("Ready", lambda: served.is_condition("Ready", "True"), timeout_s=30)
