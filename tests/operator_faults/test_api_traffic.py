"""Row 16, second part: half-open watches, refused children and deployments at rest, counted at a proxy.

The operator runs as a process of this machine, because no proxy can be put before the API server inside the cluster.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from support.kube import Cluster, wait_for
from support.operator_faults.api_client import Api
from support.operator_faults.figures import Figures
from support.operator_faults.local_operator import CountingProxy, SentRequest, operator_behind
from support.operator_faults.tenant import Tenant
from support.operators.operator_process import install_crd

pytestmark = pytest.mark.own_operator

REST_SECONDS = 60
PAUSED = {"spec": {"paused": True}}


@pytest.fixture(scope="module")
def own_tenant(cluster: Cluster, api: Api) -> Iterator[Tenant]:
    """Yield a tenant that only the local operator watches."""
    install_crd(cluster)
    with cluster.namespace("faults-local") as name:
        tenant = Tenant(api, cluster.operator_image, name)
        tenant.prepare()
        yield tenant


@pytest.fixture
def proxy(own_tenant: Tenant, cluster: Cluster, tmp_path: Path) -> Iterator[CountingProxy]:
    """Yield the proxy of an operator that runs."""
    with (
        closing(CountingProxy(own_tenant.api)) as proxy,
        operator_behind(proxy, cluster, own_tenant.namespace, tmp_path),
    ):
        yield proxy


def summary(requests: list[SentRequest]) -> dict[str, int]:
    """Return the number of requests by method and path."""
    return dict(Counter(f"{request.method} {request.path}" for request in requests))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("event", ["created resource", "changed spec", "deleted Service"])
def test_event_past_a_half_open_watch_is_noticed(
    own_tenant: Tenant, proxy: CountingProxy, figures: Figures, event: str
) -> None:
    """Freeze every connection of the operator, which sees neither data nor a close, and wait for its reaction."""
    with own_tenant.deployment("half-open", ready=False, replicas=0) as served, ExitStack() as stack:
        wait_for("children exist", lambda: served.child("pdb", "-worker"), timeout_s=30)
        uid = served.child("service")["metadata"]["uid"]
        time.sleep(5)
        assert proxy.silence_open_connections() > 0
        if event == "created resource":
            created = stack.enter_context(own_tenant.deployment("created", ready=False, replicas=0))
        elif event == "changed spec":
            served.mark("changed")
        else:
            served.api.delete("service", served.namespace, served.name)

        def is_handled() -> bool:
            if event == "created resource":
                return created.child("deployment", "-worker") is not None
            if event == "changed spec":
                return served.marked() == "changed"
            service = served.child("service")
            return service is not None and service["metadata"]["uid"] != uid

        name = f"a {event} is handled past half-open watches"
        figures.record_seconds(16, name, is_handled, limit_s=30, every_s=0.2)


@pytest.mark.timeout(300)
def test_refused_child_is_sent_with_back_off(own_tenant: Tenant, proxy: CountingProxy, figures: Figures) -> None:
    api, namespace = own_tenant.api, own_tenant.namespace
    quota = {"metadata": {"name": "no-budgets"}, "spec": {"hard": {"count/poddisruptionbudgets.policy": "0"}}}
    api.create("quota", namespace, quota)
    try:
        wait_for("quota counts", lambda: "used" in api.get("quota", namespace, "no-budgets")["status"], timeout_s=20)
        with own_tenant.deployment("refused", ready=False, replicas=0) as served:
            served.wait_named("PodDisruptionBudget", "exceeded quota")
            started = time.monotonic()
            time.sleep(REST_SECONDS)
            sent = [r for r in proxy.writes_since(started) if "poddisruptionbudgets" in r.path]
            figures.record(16, f"requests for a refused child in {REST_SECONDS} s", len(sent))
            assert len(sent) <= 8, summary(sent)
    finally:
        api.delete("quota", namespace, "no-budgets")


@pytest.mark.timeout(400)
def test_deployments_at_rest_cost_no_writes(own_tenant: Tenant, proxy: CountingProxy, figures: Figures) -> None:
    """An idle deployment is not written; a paused one with a pending change and traffic at most once a minute."""
    with (
        own_tenant.deployment("idle", behaviour={"drafts_per_second": 0}),
        own_tenant.deployment("paused", behaviour={"running": 1}) as paused,
    ):
        paused.settled_plan_version()
        paused.api.patch("sdd", paused.namespace, "paused", PAUSED)
        paused.patch({"speculation": {"depth": {"initial": 2, "max": 4}}})
        started = time.monotonic() + 20
        (worker,) = paused.pods()
        for number in range((20 + REST_SECONDS) // 4):
            paused.behave(worker, acceptance=(0.9, 0.2)[number % 2])
            time.sleep(4)
        writes = proxy.writes_since(started)
        counts = {
            name: len([request for request in writes if f"/{name}" in request.path]) for name in ("idle", "paused")
        }
        for name, count in counts.items():
            figures.record(16, f"writes in {REST_SECONDS} s, {name} deployment", count)
        assert counts["idle"] == 0, summary(writes)
        assert counts["paused"] <= 2, summary(writes)
