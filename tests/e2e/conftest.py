"""Fixtures of the end-to-end suite: a dedicated operator and workers on a real cluster, apart from a running demo.

Most tests share one endpoint and restore it afterwards; the last test deletes it. Files run in the order of their
numbers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from support.e2e.endpoint import Endpoint, resource
from support.e2e.kube import Namespace
from support.e2e.loop import SPECULATION
from support.e2e.release import ASSIGNED_USER, Release, installed, installed_crds
from support.kube import Cluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Add the resource's status and the operator's log to the report of a failed test."""
    report = yield
    endpoint, release = (getattr(item, "funcargs", {}).get(name) for name in ("endpoint", "release"))
    if report.failed and endpoint is not None:
        report.sections.append(("kubectl describe sdd", endpoint.description()))
        report.sections.append(("the operator's persisted state", endpoint.persisted_state()))
    if report.failed and release is not None:
        report.sections.append(("operator", release.logs(60)))
    return report


@pytest.fixture(scope="session")
def watched(cluster: Cluster) -> Iterator[Namespace]:
    """Yield the namespace that holds the resources."""
    with installed_crds(cluster), cluster.namespace("e2e") as name:
        yield Namespace(cluster, name)


@pytest.fixture(scope="session", autouse=True)
def release(cluster: Cluster, watched: Namespace) -> Iterator[Release]:
    """Yield the operator, which runs before and after each test."""
    user = {f"podSecurityContext.{field}": str(number) for field, number in ASSIGNED_USER.items()}
    with installed(cluster, "e2e-operator", [watched.name], user) as release:
        yield release


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
