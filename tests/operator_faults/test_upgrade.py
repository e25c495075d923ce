"""Version skew of operator and CRD, and an upgrade of the release, under constant traffic.

Helm applies the CRD of a chart before the operator's Deployment, so for a while, or for good, the old operator leads
under the new CRD, whose defaults are in every resource that it reads. The new CRD is this tree's with more fields.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.api import crd
from support.e2e.release import NO_CLUSTER_ROLES, Release, installed
from support.kube import Cluster, Manifest, is_ready, wait_for
from support.operator_faults.api_client import Api
from support.operator_faults.client_traffic import clients_of
from support.operator_faults.figures import Figures
from support.operator_faults.local_operator import CountingProxy, operator_behind
from support.operator_faults.tenant import ServedDeployment, Tenant
from support.operators.operator_process import install_crd

SKEW_SECONDS = 30
pytestmark = [pytest.mark.own_operator, pytest.mark.proof("upgrade")]

SPECULATION = {"draft": {"uri": "embedded://none"}, "tasks": [{"name": "code"}]}
LATER = "later"
"""Name of the fields that the new CRD has, each with another type and default."""
SETTINGS = {"type": "object", "default": {}, "properties": {"share": {"type": "integer", "default": 5}}}


@pytest.fixture
def tenant(cluster: Cluster, api: Api) -> Iterator[Tenant]:
    """Yield a tenant that no other release watches."""
    with cluster.namespace("faults-upgrade") as name:
        own = Tenant(api, cluster.operator_image, name)
        own.prepare()
        yield own
    install_crd(cluster)


@pytest.fixture
def installation(cluster: Cluster, tenant: Tenant) -> Iterator[Release]:
    """Yield the release under its own CRD."""
    install_crd(cluster)
    with installed(cluster, "faults-upgrade-operator", [tenant.namespace], NO_CLUSTER_ROLES) as release:
        yield release


def schema_of(definition: Manifest) -> Manifest:
    """Return the schemas of a CRD's ``spec`` and ``status``."""
    schemas: Manifest = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return schemas


def with_later_fields() -> Manifest:
    """Return a CRD that has more fields: in ``spec``, in ``spec.workers``, in the items of a list."""
    definition = crd.crd()
    spec = schema_of(definition)["spec"]["properties"]
    items = spec["speculation"]["properties"]["tasks"]["items"]["properties"]
    spec[LATER] = {"type": "string", "default": "Slow"}
    spec["workers"]["properties"][LATER] = SETTINGS
    items[LATER] = {"type": "boolean", "default": True}
    return definition


def without_fields() -> Manifest:
    """Return a CRD that lacks a field that the operator reads, and two that it writes."""
    definition = crd.crd()
    schemas = schema_of(definition)
    del schemas["spec"]["properties"]["workers"]["properties"]["updatePolicy"]
    del schemas["status"]["properties"]["url"]
    del schemas["status"]["properties"]["speculation"]["properties"]["depth"]
    return definition


def later_defaults(served: ServedDeployment) -> list[object]:
    spec = served.get()["spec"]
    return [spec[LATER], spec["workers"][LATER], spec["speculation"]["tasks"][0][LATER]]


def seconds_to_new_plan(served: ServedDeployment, depth: int) -> float:
    """Change the bounds of the depth, and return the time until all workers have a plan made for them."""
    version, started = max(served.plan_versions()), time.monotonic()
    served.patch({"speculation": {"depth": {"initial": 2, "max": depth}}})
    wait_for("workers take a new plan", lambda: min(served.plan_versions()) > version, timeout_s=30, every_s=0.2)
    wait_for("status is about the change", lambda: served.is_condition("Ready", "True"), timeout_s=30)
    return time.monotonic() - started


def ready_since(served: ServedDeployment) -> str:
    """Return when the deployment became Ready. Fails if it is not, or if a condition says that something is refused."""
    conditions = served.conditions()
    refused = [one for one in conditions.values() if re.search("refus", one["reason"] + one["message"], re.IGNORECASE)]
    assert not refused, refused
    assert conditions["Ready"]["status"] == "True", conditions["Ready"]
    return str(conditions["Ready"]["lastTransitionTime"])


@pytest.mark.timeout(280)
def test_upgrade_under_traffic(cluster: Cluster, tenant: Tenant, installation: Release, figures: Figures) -> None:
    """The old operator works under the new CRD, and the upgrade to the new operator fails no request."""
    fields: dict[str, Any] = {"speculation": SPECULATION, "drain": {"endpointDelay": "2s", "gracePeriod": "5s"}}
    with tenant.deployment("upgraded", replicas=2, behaviour={"check_tokens": True}, **fields) as served:
        served.settled_plan_version()
        workers, since = served.restarts(), ready_since(served)
        with clients_of(served) as clients:
            install_crd(cluster, with_later_fields())
            skewed = time.monotonic()
            defaults = ["Slow", {"share": 5}, True]
            wait_for("new fields have defaults", lambda: later_defaults(served) == defaults, timeout_s=20)
            seconds_to_new_plan(served, depth=4)  # perhaps from a watch that still has the old schema
            while time.monotonic() < skewed + SKEW_SECONDS:
                assert ready_since(served) == since
                time.sleep(0.5)
            seconds = seconds_to_new_plan(served, depth=5)
            figures.record("upgrade", "old operator, new CRD: seconds from a change to its plan and status", seconds)
            assert ready_since(served) == since
            figures.record("upgrade", "old operator, new CRD: seconds Ready", time.monotonic() - skewed)
            assert served.restarts() == workers

            leader, started = installation.leader()["metadata"]["name"], time.monotonic()
            installation.upgrade()
            figures.record("upgrade", "seconds until only new operators run", time.monotonic() - started)
            wait_for("a new pod leads", lambda: installation.leader()["metadata"]["name"] != leader, timeout_s=30)
            figures.record("upgrade", "seconds until a new operator leads", time.monotonic() - started)
            figures.record("upgrade", "seconds from a change to its plan and status", seconds_to_new_plan(served, 6))
            seconds = time.monotonic() - started
            figures.record("upgrade", "seconds from helm upgrade to a true status of a new change", seconds)
            assert ready_since(served) == since
        figures.record("upgrade", "failed of requests", f"{len(clients.failures)} of {clients.answered}")
        replaced = len(set(workers) - set(served.restarts()))
        figures.record("upgrade", "workers that were replaced", replaced)
        assert not clients.failures, clients.failures[:5]
        assert replaced == 0
        assert seconds < 60


@pytest.mark.timeout(200)
def test_operator_with_an_older_crd(cluster: Cluster, tenant: Tenant, figures: Figures, tmp_path: Path) -> None:
    """The operator works without the fields that the CRD lacks, names those of the status, and does not ask again."""
    install_crd(cluster, without_fields())
    with (
        closing(CountingProxy(tenant.api)) as proxy,
        operator_behind(proxy, cluster, tenant.namespace, tmp_path) as operator,
        tenant.deployment("earlier", behaviour={"drafts_per_second": 0}) as served,
    ):
        served.settled_plan_version()
        workers = served.restarts()
        seconds = seconds_to_new_plan(served, depth=4)
        figures.record("upgrade", "new operator, old CRD: seconds from a change to its plan and status", seconds)
        status = served.get()["status"]
        assert "url" not in status
        assert "depth" not in status["speculation"]
        time.sleep(5)
        rested = time.monotonic()
        time.sleep(20)
        writes = [request for request in proxy.writes_since(rested) if "/earlier" in request.path]
        figures.record("upgrade", "new operator, old CRD: writes at rest in 20 s", len(writes))
        assert not writes, writes
        assert ready_since(served)
        assert served.restarts() == workers
        lines = [
            line for line in operator.log.read_text().splitlines() if "the CRD is older than this operator" in line
        ]
        named = re.findall(r"status\.[\w.]+", " ".join(lines))
        assert sorted(named) == ["status.speculation.depth", "status.url"], lines
        assert "ERROR" not in operator.log.read_text()


@pytest.mark.timeout(280)
@pytest.mark.parametrize("is_restarted", [False, True], ids=["stays", "restarted"])
def test_operator_that_was_there_before_the_crd(
    cluster: Cluster, tenant: Tenant, installation: Release, figures: Figures, is_restarted: bool
) -> None:
    """An operator whose CRD is deleted, or that starts without one, serves as soon as there is one."""
    for definition in (crd.crd(), crd.draft_crd()):
        cluster.kubectl("delete", "crd", definition["metadata"]["name"])
    for pod in installation.pods() if is_restarted else ():
        tenant.api.delete("pod", installation.namespace.name, pod["metadata"]["name"])
    time.sleep(30)
    assert not is_restarted or not any(map(is_ready, installation.pods())), "Ready without the kind that it serves"
    install_crd(cluster)
    with tenant.deployment("late", behaviour={"drafts_per_second": 0}) as served:
        started = time.monotonic()
        served.settled_plan_version()
        seconds = time.monotonic() - started
        figures.record(
            "upgrade", f"CRD after the operator, which {'' if is_restarted else 'was not '}restarted", seconds
        )
        assert ready_since(served)
