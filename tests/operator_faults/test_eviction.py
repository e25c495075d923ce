"""Row 13: unhealthy workers can be drained, and the operator evicts a worker instead of deleting it."""

from __future__ import annotations

import threading

import pytest

from support.kube import Manifest, wait_for
from support.operator_faults.api_client import ApiError
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import ServedDeployment, Tenant

COLLAPSE_SECONDS = 240


@pytest.mark.timeout(240)
def test_unready_workers_can_be_evicted(tenant: Tenant, figures: Figures) -> None:
    with tenant.deployment("broken", replicas=2) as served:
        pods = served.pods()
        for pod in pods:
            served.behave(pod, ready=False)
        wait_for("no worker is ready", lambda: not served.pods(), timeout_s=30)

        def budget_observed() -> bool:
            budget = served.child("pdb", "-worker")
            return budget is not None and budget["status"].get("currentHealthy") == 0

        wait_for("the budget has seen it", budget_observed, timeout_s=30)
        refusals = []
        for pod in pods:
            try:
                served.api.evict(served.namespace, pod["metadata"]["name"])
            except ApiError as error:
                refusals.append(f"{error.status} {error}")
        figures.record(13, "refused evictions of 2 broken workers", len(refusals))
        assert not refusals


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
