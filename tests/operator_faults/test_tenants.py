"""Row 6 and the two-tenant proof: faults of one tenant do not delay the changes of another."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from support.kube import wait_for
from support.operator_faults.figures import Figures, percentile
from support.operator_faults.tenant import ServedDeployment, Tenant

CHANGES = 20
LIMIT_SECONDS = 2.0
GIVE_UP_SECONDS = 15
DEFAULT_CONCURRENCY = 4
"""Deployments that e7feb28 reconciles at a time; as many slow ones stop all others."""


def measure_changes(served: ServedDeployment, figures: Figures, row: str, *, pause_s: float = 0.3) -> float:
    """Change a spec several times and return the 99th percentile of the time until its child has the change."""
    times: list[float] = []
    for number in range(CHANGES):
        try:
            times.append(served.seconds_to_mark(f"change-{number}", timeout_s=GIVE_UP_SECONDS))
        except AssertionError:
            figures.record(row, "p99 seconds from spec change to child", f"over {GIVE_UP_SECONDS}")
            raise
        time.sleep(pause_s)
    worst = percentile(times, 99)
    figures.record(row, "p99 seconds from spec change to child", worst)
    figures.record(row, "median seconds from spec change to child", percentile(times, 50))
    return worst


def wait_asked(served: ServedDeployment) -> None:
    """Wait until the operator has asked each worker for a report."""
    wait_for(
        f"workers of {served.name} were asked",
        lambda: all(served.worker_state(pod)["reports"] for pod in served.pods()),
        timeout_s=30,
    )


@pytest.mark.timeout(400)
def test_slow_workers_of_one_tenant_do_not_delay_another(
    tenant: Tenant, other_tenant: Tenant, figures: Figures
) -> None:
    """Workers that send one byte a second stall nothing but their own reports."""
    with ExitStack() as stack:
        calm = stack.enter_context(other_tenant.deployment("calm", replicas=0))
        slow = [stack.enter_context(tenant.deployment(f"slow-{index}")) for index in range(DEFAULT_CONCURRENCY)]
        for served in slow:
            served.behave(served.pods()[0], report="drip")
        for served in slow:
            wait_asked(served)
        time.sleep(5)
        assert measure_changes(calm, figures, "6") < LIMIT_SECONDS


@pytest.mark.timeout(400)
def test_faults_of_one_tenant_do_not_delay_another(tenant: Tenant, other_tenant: Tenant, figures: Figures) -> None:
    """A hanging worker, a refused child and a bad spec at once."""
    api, namespace = tenant.api, tenant.namespace
    with ExitStack() as stack:
        calm = stack.enter_context(other_tenant.deployment("calm", replicas=0))
        hanging = stack.enter_context(tenant.deployment("hanging"))
        bad = stack.enter_context(tenant.deployment("bad", replicas=0))
        quota = {"metadata": {"name": "services"}, "spec": {"hard": {"count/services": "2"}}}
        api.create("quota", namespace, quota)
        stack.callback(api.delete, "quota", namespace, "services")
        wait_for("the quota counts", lambda: "used" in api.get("quota", namespace, "services")["status"], timeout_s=20)
        refused = stack.enter_context(tenant.deployment("refused", ready=False, replicas=0))
        hanging.behave(hanging.pods()[0], report="hang", plan="hang")
        bad.patch({"workers": {"template": {"spec": {"containers": [{"image": "localhost/nothing:1"}]}}}})
        assert refused.wait_named("Service", "exceeded quota") < 30
        assert measure_changes(calm, figures, "two tenants") < LIMIT_SECONDS
