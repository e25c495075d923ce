"""Constant traffic of eight clients while the API server is gone for a minute or etcd is slow: no request may fail."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from support.cluster_faults.control_plane_faults import dead_api_server, hanging_api_server, slow_etcd, time_calls
from support.e2e.release import Release
from support.kube import wait_for
from support.operator_faults.client_traffic import DRAIN, assert_status_true, unnoticed
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import ServedDeployment, Tenant
from support.percentile import percentile

pytestmark = [pytest.mark.disruptive, pytest.mark.timeout(400)]
FAULT_SECONDS = 60


@pytest.fixture
def served(tenant: Tenant, installation: Release, request: pytest.FixtureRequest) -> Iterator[ServedDeployment]:
    """Yield a deployment with a name of its own.

    A controller manager that has just started removes the EndpointSlices of a deleted Service late. A new Service of
    the same name would send requests to their dead addresses.
    """
    name = "outage-" + re.sub("[^a-z]+", "-", request.node.name.removeprefix("test_")).strip("-")
    with tenant.deployment(name, replicas=2, drain=DRAIN) as served:
        yield served
    wait_for("the operator runs", installation.is_running, timeout_s=120)


@pytest.mark.parametrize(
    ("label", "fault"),
    [("API server hangs for 60 s", hanging_api_server), ("API server dead for 60 s", dead_api_server)],
    ids=["hangs", "dead"],
)
def test_api_server_gone(
    served: ServedDeployment, figures: Figures, label: str, fault: Callable[[], AbstractContextManager[None]]
) -> None:
    restarts = served.restarts()
    with unnoticed(served, figures, label):
        with fault():
            time.sleep(FAULT_SECONDS)
        assert_status_true(served, figures, label)
    assert served.restarts() == restarts


def test_slow_etcd(served: ServedDeployment, figures: Figures) -> None:
    """Writes of the test show how slow it is; meanwhile the operator applies a change."""
    label, restarts = "etcd slow for 60 s", served.restarts()

    def write() -> None:
        served.api.patch("configmap", served.namespace, "latency", {"data": {"at": str(time.time())}})

    served.api.create("configmap", served.namespace, {"metadata": {"name": "latency"}})
    usual = time_calls(write, 3)
    with unnoticed(served, figures, label):
        with slow_etcd():
            began = time.monotonic()
            served.patch({"speculation": {"depth": {"initial": 2, "max": 5}}})
            wait_for("the change is applied", lambda: served.is_condition("Ready", "True"), timeout_s=FAULT_SECONDS)
            figures.record("traffic", f"{label}: seconds to a true status meanwhile", time.monotonic() - began)
            slow = time_calls(write, FAULT_SECONDS - (time.monotonic() - began))
        assert_status_true(served, figures, label)
    for name, durations in (("usual", usual), ("slow", slow)):
        seconds = f"{percentile(durations, 50):.2f} s, {percentile(durations, 99):.2f} s"
        figures.record("traffic", f"{label}: p50 and p99 of a write, {name}", seconds)
    assert percentile(slow, 50) > percentile(usual, 50), "etcd was not slow"
    assert served.restarts() == restarts
