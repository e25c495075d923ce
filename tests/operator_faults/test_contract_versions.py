"""Row 17: the operator reads workers of the last three contract versions, and names one that is older."""

from __future__ import annotations

import time

import pytest

from specdecode_worker.contract import CONTRACT_VERSION
from support.kube import wait_for
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import Tenant

OLDEST = max(1, CONTRACT_VERSION - 2)
TOO_OLD = OLDEST - 1


@pytest.mark.timeout(240)
def test_supported_contract_versions_are_read(tenant: Tenant, figures: Figures) -> None:
    versions = list(range(OLDEST, CONTRACT_VERSION + 1))
    with tenant.deployment("versions", replicas=len(versions)) as served:
        for pod, version in zip(served.pods(), versions, strict=True):
            served.behave(pod, contract_version=version)
        before = served.settled_plan_version()
        served.patch({"speculation": {"depth": {"initial": 2, "max": 4}}})
        wait_for("each takes a new plan", lambda: min(served.plan_versions()) > before, timeout_s=30)
        wait_for("each report is read", lambda: served.is_condition("ReportsFresh", "True"), timeout_s=30)
        figures.record(17, "contract versions that are read", str(versions))


@pytest.mark.timeout(240)
def test_too_old_contract_version_is_named(tenant: Tenant, figures: Figures) -> None:
    with tenant.deployment("outdated", replicas=2) as served:
        old, _ = served.pods()
        served.behave(old, contract_version=TOO_OLD)
        started = time.monotonic()
        try:
            served.wait_named(old["metadata"]["name"], "contract", timeout_s=60)
            figures.record(17, "seconds to name a worker that is too old", time.monotonic() - started)
        except AssertionError:
            figures.record(17, "seconds to name a worker that is too old", "not within 60")
            raise
