"""Row 6: faults of one tenant do not delay the changes of another."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from support.kube import wait_for
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import ServedDeployment, Tenant
from support.percentile import percentile

CHANGES = 20
LIMIT_SECONDS = 2.0
GIVE_UP_SECONDS = 15


def measure_changes(served: ServedDeployment, figures: Figures) -> float:
    """Change a spec several times and return the 99th percentile of the time until its child has the change."""
    times: list[float] = []
    for number in range(CHANGES):
        times.append(served.seconds_to_mark(f"change-{number}", timeout_s=GIVE_UP_SECONDS))
        time.sleep(0.3)
    worst = percentile(times, 99)
    figures.record(6, "p99 seconds from spec change to child", worst)
    figures.record(6, "median seconds from spec change to child", percentile(times, 50))
    return worst


@pytest.mark.timeout(400)
def test_faults_of_one_tenant_do_not_delay_another(tenant: Tenant, other_tenant: Tenant, figures: Figures) -> None:
    """A worker that hangs, one that sends a byte a second, a refused child and a bad spec at once."""
    api, namespace = tenant.api, tenant.namespace
    with ExitStack() as stack:
        calm = stack.enter_context(other_tenant.deployment("calm", replicas=0))
        slow = stack.enter_context(tenant.deployment("slow", replicas=2))
        bad = stack.enter_context(tenant.deployment("bad", replicas=0))
        quota = {"metadata": {"name": "services"}, "spec": {"hard": {"count/services": "2"}}}
        api.create("quota", namespace, quota)
        stack.callback(api.delete, "quota", namespace, "services")
        wait_for("the quota counts", lambda: "used" in api.get("quota", namespace, "services")["status"], timeout_s=20)
        refused = stack.enter_context(tenant.deployment("refused", ready=False, replicas=0))
        hanging, dripping = slow.pods()
        slow.behave(hanging, report="hang", plan="hang")
        slow.behave(dripping, report="drip")
        bad.patch({"workers": {"template": {"spec": {"containers": [{"image": "localhost/nothing:1"}]}}}})
        assert refused.wait_named("Service", "exceeded quota") < 30
        assert measure_changes(calm, figures) < LIMIT_SECONDS
