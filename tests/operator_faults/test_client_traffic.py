"""Constant traffic of eight clients through faults of operator and workers: no request may fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.e2e.traffic import Traffic
from support.kube import wait_for
from support.operator_faults.api_client import ApiError
from support.operator_faults.client_traffic import DRAIN, assert_status_true, unnoticed
from support.operator_faults.figures import Figures
from support.operator_faults.installation import Installation, kill_operator
from support.operator_faults.tenant import ServedDeployment, Tenant


@pytest.fixture
def served(tenant: Tenant, installation: Installation) -> Iterator[ServedDeployment]:
    with tenant.deployment("traffic", replicas=2, drain=DRAIN) as served:
        yield served


@pytest.fixture
def clients(served: ServedDeployment, figures: Figures, request: pytest.FixtureRequest) -> Iterator[Traffic]:
    """Yield running clients; afterwards their failures are recorded and must be none."""
    with unnoticed(served, figures, request.node.name.removeprefix("test_").replace("_", " ")) as clients:
        yield clients


@pytest.mark.timeout(240)
def test_operator_killed(
    served: ServedDeployment, clients: Traffic, installation: Installation, figures: Figures
) -> None:
    for pod in installation.pods():
        kill_operator(pod)
    assert_status_true(served, figures, "operator killed")


@pytest.mark.timeout(240)
def test_leader_changed(
    served: ServedDeployment, clients: Traffic, installation: Installation, figures: Figures
) -> None:
    leader = installation.leader()["metadata"]["name"]
    installation.api.delete("pod", installation.home, leader)
    assert_status_true(served, figures, "leader changed")
    wait_for("the operator runs", installation.is_running, timeout_s=120)


@pytest.mark.timeout(300)
def test_each_worker_evicted(served: ServedDeployment, clients: Traffic, figures: Figures) -> None:
    refusals = 0
    for pod in served.pods():
        name = pod["metadata"]["name"]

        def evicted(name: str = name) -> bool:
            nonlocal refusals
            try:
                served.api.evict(served.namespace, name)
            except ApiError as error:
                refusals += error.status == 429
                return error.status == 404
            return True

        wait_for(f"{name} is evicted", evicted, timeout_s=60, every_s=1)
    figures.record("traffic", "evictions that had to wait for the budget", refusals)
    served.wait_running(2)
    assert_status_true(served, figures, "each worker evicted")


@pytest.mark.timeout(240)
def test_admin_secret_deleted(served: ServedDeployment, clients: Traffic, figures: Figures) -> None:
    labels = "specdecode.io/name=traffic"
    for secret in served.api.list("secret", served.namespace, labels):
        served.api.delete("secret", served.namespace, secret["metadata"]["name"])
    assert_status_true(served, figures, "admin Secret deleted")
