"""Row 5, with workers: a deployment that was deleted with orphans and created again reaches its workers."""

from __future__ import annotations

import pytest

from support.kube import wait_for
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import Tenant


@pytest.mark.timeout(300)
def test_workers_of_an_adopted_workload_take_plans(tenant: Tenant, figures: Figures) -> None:
    """The new resource has another uid; workers must accept its token and get its plan."""
    behaviour = {"check_tokens": True}
    with tenant.deployment("adopted", behaviour=behaviour) as served:
        served.settled_plan_version()
        tenant.api.delete("sdd", tenant.namespace, "adopted", propagation="Orphan")
        # The garbage collector, which orphans the children, learns of a new kind within a minute.
        wait_for("it is gone", lambda: tenant.api.find("sdd", tenant.namespace, "adopted") is None, timeout_s=90)
        manifest = tenant.manifest("adopted", behaviour=behaviour)
        uid = tenant.api.create("sdd", tenant.namespace, manifest)["metadata"]["uid"]

        def has_plan() -> bool:
            states = [served.worker_state(pod) for pod in served.pods()]
            plans = [state["plan"]["uid"] for state in states]
            assert plans == [uid], f"plans of {plans}, 401 to {[state['unauthorized'] for state in states]} requests"
            return True

        figures.record_seconds(5, "an adopted worker takes a plan of the new resource", has_plan, limit_s=60)
