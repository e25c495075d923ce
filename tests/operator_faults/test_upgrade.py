"""An upgrade of the release from another revision under constant traffic: no request fails, and workers take plans.

The renamed field of the accelerator is a change of the spec, so workers may be replaced; their number is recorded.

OPERATOR_FAULTS_FROM_SOURCE and OPERATOR_FAULTS_FROM_IMAGE name the revision before
(support/operator_faults/revision.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from support.kube import Cluster, wait_for
from support.operator_faults.api_client import Api
from support.operator_faults.constant_clients import ConstantClients
from support.operator_faults.figures import Figures
from support.operator_faults.installation import Installation, install_crd
from support.operator_faults.revision import Revision
from support.operator_faults.tenant import Tenant

FROM = "OPERATOR_FAULTS_FROM_"
pytestmark = [
    pytest.mark.own_operator,
    pytest.mark.proof("upgrade"),
]


@pytest.fixture
def before(cluster: Cluster) -> Revision:
    assert os.environ.get(f"{FROM}IMAGE"), f"this proof needs {FROM}IMAGE and {FROM}SOURCE (docs/operator-faults.md)"
    return Revision.from_environment(cluster, FROM)


@pytest.fixture
def old_tenant(cluster: Cluster, api: Api, revision: Revision, before: Revision) -> Iterator[Tenant]:
    """Yield a tenant of the old release. Its stand-ins run the new image, so that they need no rollout."""
    install_crd(cluster, before)
    with cluster.namespace("faults-upgrade") as name:
        tenant = Tenant(api, replace(before, image=revision.image), name)
        tenant.prepare()
        yield tenant
    install_crd(cluster, revision)


@pytest.fixture
def old_release(cluster: Cluster, api: Api, before: Revision, old_tenant: Tenant) -> Iterator[Installation]:
    with cluster.namespace("faults-upgrade-operator") as home:
        installation = Installation(cluster, api, before, home, (old_tenant.namespace,))
        installation.install()
        yield installation
        installation.uninstall()


@pytest.mark.timeout(500)
def test_upgrade_under_traffic(
    cluster: Cluster, revision: Revision, old_tenant: Tenant, old_release: Installation, figures: Figures
) -> None:
    drain = {"endpointDelay": "2s", "gracePeriod": "5s"}
    with old_tenant.deployment("upgraded", replicas=2, drain=drain, behaviour={"check_tokens": True}) as served:
        version, pods = served.settled_plan_version(), served.restarts()
        address = served.child("service")["spec"]["clusterIP"]
        with ConstantClients(f"http://{address}") as clients:
            time.sleep(2)
            install_crd(cluster, revision)
            started = time.monotonic()
            old_release.upgrade(revision)
            wait_for("status is true", lambda: served.is_condition("Ready", "True"), timeout_s=60)
            figures.record("upgrade", "seconds from helm upgrade to a true status", time.monotonic() - started)
            served.patch({"speculation": {"depth": {"initial": 2, "max": 4}}})
            wait_for("workers take a new plan", lambda: min(served.plan_versions()) > version, timeout_s=30)
        figures.record("upgrade", "failed of requests", f"{len(clients.failures)} of {clients.answered}")
        figures.record("upgrade", "workers that were replaced", len(set(pods) - set(served.restarts())))
        assert not clients.failures, clients.failures[:5]
