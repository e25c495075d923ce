"""Row 16, second part: half-open watches, refused children and deployments at rest, counted at a proxy.

The operator runs as a process of this machine, because no proxy can be put before the API server inside the cluster.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.api_client import Api
from harness.counting_proxy import SentRequest, counting_proxy
from harness.figures import Figures
from harness.installation import install_crd
from harness.local_operator import LocalOperator, local_operator_process
from harness.revision import Revision
from harness.tenant import Tenant
from kube import Cluster, wait_for

REST_SECONDS = 60
PAUSED = {"metadata": {"annotations": {"specdecode.io/paused": "true"}}}


@pytest.fixture(scope="module")
def own_tenant(cluster: Cluster, api: Api, revision: Revision) -> Iterator[Tenant]:
    """Yield a tenant that only the local operator watches."""
    install_crd(cluster, revision)
    with cluster.namespace("faults-local") as name:
        tenant = Tenant(api, revision, name)
        tenant.prepare()
        yield tenant


@pytest.fixture
def local_operator(own_tenant: Tenant, tmp_path: Path) -> Iterator[LocalOperator]:
    with (
        counting_proxy(own_tenant.api) as proxy,
        local_operator_process(proxy, own_tenant.revision, own_tenant.namespace, tmp_path) as operator,
    ):
        yield operator


def summary(requests: list[SentRequest]) -> dict[str, int]:
    """Return the number of requests by method and path."""
    return dict(Counter(f"{request.method} {request.path}" for request in requests))


@pytest.mark.timeout(300)
def test_half_open_watch_is_replaced(own_tenant: Tenant, local_operator: LocalOperator, figures: Figures) -> None:
    with own_tenant.deployment("half-open", ready=False, replicas=0) as served:
        served.seconds_to_mark("before", timeout_s=30)
        assert local_operator.proxy.freeze() > 0
        try:
            seconds = served.seconds_to_mark("after", timeout_s=60)
            figures.record(16, "seconds to notice a change past a half-open watch", seconds)
        except AssertionError:
            figures.record(16, "seconds to notice a change past a half-open watch", "not within 60")
            raise
        # The child's watch is half-open too: a deleted child must still return.
        assert seconds < 30
        started = time.monotonic()
        uid = served.workload()["metadata"]["uid"]
        local_operator.proxy.freeze()
        served.api.delete("deployment", served.namespace, "half-open-worker")

        def is_back() -> bool:
            workload = served.child("deployment", "-worker")
            return workload is not None and workload["metadata"]["uid"] != uid

        wait_for("the child returns", is_back, timeout_s=90)
        figures.record(16, "seconds until a child returns past a half-open watch", time.monotonic() - started)
        assert time.monotonic() - started < 30


@pytest.mark.timeout(300)
def test_refused_child_is_sent_with_back_off(
    own_tenant: Tenant, local_operator: LocalOperator, figures: Figures
) -> None:
    api, namespace = own_tenant.api, own_tenant.namespace
    quota = {"metadata": {"name": "no-budgets"}, "spec": {"hard": {"count/poddisruptionbudgets.policy": "0"}}}
    api.create("quota", namespace, quota)
    try:
        wait_for("quota counts", lambda: "used" in api.get("quota", namespace, "no-budgets")["status"], timeout_s=20)
        with own_tenant.deployment("refused", ready=False, replicas=0) as served:
            served.wait_named("PodDisruptionBudget", "exceeded quota")
            started = time.monotonic()
            time.sleep(REST_SECONDS)
            sent = [r for r in local_operator.proxy.since(started) if "poddisruptionbudgets" in r.path]
            figures.record(16, f"requests for a refused child in {REST_SECONDS} s", len(sent))
            assert len(sent) <= 8, summary(sent)
    finally:
        api.delete("quota", namespace, "no-budgets")


@pytest.mark.timeout(400)
def test_deployments_at_rest_cost_no_writes(
    own_tenant: Tenant, local_operator: LocalOperator, figures: Figures
) -> None:
    """An idle deployment and a paused one under traffic are not written."""
    with (
        own_tenant.deployment("idle", behaviour={"drafts_per_second": 0}),
        own_tenant.deployment("paused", behaviour={"running": 1}) as paused,
    ):
        paused.settled_plan_version()
        paused.api.patch("sdd", paused.namespace, "paused", PAUSED)
        time.sleep(20)
        started = time.monotonic()
        time.sleep(REST_SECONDS)
        writes = local_operator.proxy.since(started)
        for name in ("idle", "paused"):
            mine = [request for request in writes if f"/{name}" in request.path]
            figures.record(16, f"writes in {REST_SECONDS} s, {name} deployment", len(mine))
        assert not writes, summary(writes)
