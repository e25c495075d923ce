"""Row 13: the operator evicts an unhealthy worker instead of deleting it, and evictions fail no request."""

from __future__ import annotations

import threading

import pytest

from support.kube import Manifest, wait_for
from support.operator_faults.api_client import ApiError
from support.operator_faults.client_traffic import DRAIN, assert_status_true, unnoticed
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import ServedDeployment, Tenant

COLLAPSE_SECONDS = 240


def last_state(served: ServedDeployment, name: str, seconds: int) -> list[Manifest]:
    """Watch the pods and return a pod's states from the start of its termination on."""
    version = served.api.version("pod", served.namespace)
    states: list[Manifest] = []
    for kind, pod in served.api.watch("pod", served.namespace, seconds, version):
        if pod["metadata"].get("name") != name:
            continue
        if "deletionTimestamp" in pod["metadata"]:
            states.append(pod)
        if kind == "DELETED":
            break
    return states


@pytest.mark.timeout(500)
def test_collapsed_worker_is_replaced_by_eviction(tenant: Tenant, figures: Figures) -> None:
    behaviour = {"acceptance": 0.8, "running": 1, "drafts_per_second": 50}
    workers = {"recycle": "OnCollapse"}
    with tenant.deployment("collapsed", replicas=3, behaviour=behaviour, workers=workers) as served:
        served.settled_plan_version()
        threading.Event().wait(20)  # until every worker has a past of several hundred drafts
        sick = served.pods()[0]
        states: list[Manifest] = []
        watcher = threading.Thread(
            target=lambda: states.extend(last_state(served, sick["metadata"]["name"], COLLAPSE_SECONDS))
        )
        watcher.start()
        served.behave(sick, acceptance=0.02)
        watcher.join(COLLAPSE_SECONDS + 20)
        assert states, f"the worker was not replaced within {COLLAPSE_SECONDS} s: {served.conditions()}"
        conditions = {c["type"]: c for state in states for c in state["status"].get("conditions", [])}
        evicted = conditions.get("DisruptionTarget", {}).get("reason", "deleted")
        figures.record(13, "removal of a collapsed worker", evicted)
        assert evicted == "EvictionByEvictionAPI"


@pytest.mark.timeout(300)
def test_evictions_of_each_worker_fail_no_request(tenant: Tenant, figures: Figures) -> None:
    """Eight clients ask all the time, and the budget makes the second eviction wait."""
    label = "each worker evicted"
    with (
        tenant.deployment("traffic", replicas=2, drain=DRAIN) as served,
        unnoticed(served, figures, label),
    ):
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
        assert_status_true(served, figures, label)
