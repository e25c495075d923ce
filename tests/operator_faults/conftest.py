"""Black-box tests of the operator under faults, on a real cluster, with a release of its own and stand-in workers.

The tests look only at the Kubernetes API, at stand-in workers and at clients. The tests in quick/ always run; the
others are the proofs `operator-faults` and `upgrade`. Those that take the API server away (`disruptive`) run on the
local cluster only.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.e2e.release import NO_CLUSTER_ROLES, Release, installed
from support.kube import Cluster
from support.operator_faults.api_client import Api
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import Tenant
from support.operators.operator_process import install_crd
from support.tiers import skip_reason

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "own_operator: needs no operator, or brings one of its own")
    config.addinivalue_line("markers", "disruptive: takes the API server of the whole cluster away")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        if HERE / "quick" not in item.path.parents and not item.get_closest_marker("proof"):
            item.add_marker(pytest.mark.proof("operator-faults"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Add the operator's log to the report of a failed test."""
    report = yield
    installation = getattr(item, "funcargs", {}).get("installation")
    if report.failed and installation is not None:
        report.sections.append(("operator", installation.logs(60)))
    return report


@pytest.fixture(scope="session")
def api(cluster: Cluster) -> Api:
    return Api(cluster.kubeconfig)


@pytest.fixture(scope="session")
def figures(cluster: Cluster) -> Figures:
    return Figures(cluster.operator_image.rpartition(":")[2])


@pytest.fixture(scope="session")
def tenants(cluster: Cluster, api: Api) -> Iterator[tuple[Tenant, Tenant]]:
    """Yield two tenants, each with a namespace of its own; both are watched by the installed operator."""
    install_crd(cluster)
    with cluster.namespace("faults-a") as first, cluster.namespace("faults-b") as second:
        both = Tenant(api, cluster.operator_image, first), Tenant(api, cluster.operator_image, second)
        for tenant in both:
            tenant.prepare()
        yield both


@pytest.fixture(scope="session")
def tenant(tenants: tuple[Tenant, Tenant]) -> Tenant:
    return tenants[0]


@pytest.fixture(scope="session")
def other_tenant(tenants: tuple[Tenant, Tenant]) -> Tenant:
    return tenants[1]


@pytest.fixture(scope="session")
def installation(cluster: Cluster, tenants: tuple[Tenant, Tenant]) -> Iterator[Release]:
    with installed(cluster, "faults-operator", [tenant.namespace for tenant in tenants], NO_CLUSTER_ROLES) as release:
        yield release


@pytest.fixture(autouse=True)
def running_operator(request: pytest.FixtureRequest, cluster: Cluster) -> None:
    """Install the operator before the first test that needs it."""
    if "disruptive" in request.keywords and not cluster.local:
        pytest.skip(skip_reason("local cluster", "the API server is taken away"))
    if "own_operator" not in request.keywords:
        request.getfixturevalue("installation")
