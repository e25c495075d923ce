"""Fixtures of the end-to-end suite: a dedicated operator and workers on a real cluster, apart from a running demo.

Most tests share one endpoint and restore it afterwards; the last test deletes it. Files run in the order of their
numbers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.e2e.endpoint import Endpoint, resource
from support.e2e.kube import Namespace
from support.e2e.loop import SPECULATION
from support.e2e.release import Crd, Release
from support.kube import Cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder as an end-to-end test that needs the cluster."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.cluster)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Add the resource's status and the operator's log to the report of a failed test."""
    report = yield
    endpoint, release = (getattr(item, "funcargs", {}).get(name) for name in ("endpoint", "release"))
    if report.failed and endpoint is not None:
        report.sections.append(("kubectl describe sdd", endpoint.description()))
        report.sections.append(("the operator's persisted state", endpoint.persisted_state()))
    if report.failed and release is not None:
        report.sections.append(("operator", "\n".join(release.logs().splitlines()[-60:])))
    return report


@pytest.fixture(scope="session")
def watched(cluster: Cluster) -> Iterator[Namespace]:
    """Yield the namespace that holds the resources."""
    crd = Crd(cluster)
    crd.install()
    with cluster.namespace("e2e") as name:
        yield Namespace(cluster, name)
    crd.remove()


@pytest.fixture(scope="session")
def release(cluster: Cluster, watched: Namespace) -> Iterator[Release]:
    with cluster.namespace("e2e-operator") as home:
        release = Release(cluster, home, watched.name)
        release.install()
        yield release
        release.uninstall()


@pytest.fixture(scope="session")
def endpoint(release: Release, watched: Namespace) -> Endpoint:
    """Yield the shared deployment, Ready.

    It has little stability, so that the control loop changes plans within one test.
    """
    watched.apply(resource("shared", SPECULATION))
    endpoint = Endpoint(watched, "shared")
    try:
        endpoint.wait_ready()
    except AssertionError as error:
        error.add_note(f"{endpoint.description()}\n{release.logs()}")
        raise
    return endpoint
