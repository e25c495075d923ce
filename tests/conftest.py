"""Fixtures for all test suites. A suite that needs a cluster requests `cluster` or `namespace`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.processes import children

pytest_plugins = ["pytester", "support.tiers"]
# tests/kernels runs kernels in Triton's interpreter. Triton reads this variable when it is first imported, which other
# packages (transformers) do too. tests/gpu compiles its kernels and runs separately with 0.
os.environ.setdefault("TRITON_INTERPRET", "1")
# What a test starts in a process of its own finds the package `support` too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))

if TYPE_CHECKING:  # tests/gpu runs on machines that have no client of a cluster
    from support.kube import Cluster
    from support.prometheus import Promtool


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Fail at the end of a session that leaves a process of ours, for which a fixture is to blame."""
    yield
    deadline = time.monotonic() + 5  # a killed process takes a moment
    while left := _own_children():
        assert time.monotonic() < deadline, f"tests have left processes: {left}"
        time.sleep(0.05)


@pytest.fixture(scope="session", autouse=True)
def _temporary_folders_go(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the temporary folders of processes that tests kill among those of pytest, which deletes them."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("tmp"))


def _own_children() -> dict[int, str]:
    """Return the command lines of running children with code of the project, by their ids."""
    return {
        pid: words
        for pid, words in children(os.getpid()).items()
        # The fork server of multiprocessing serves until this process ends.
        if ("specdecode_" in words or "spawn_main" in words) and "forkserver" not in words
    }


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """Return the cluster to test on.

    Without a cluster, tests that are started by hand are skipped with a message; hack/test always provides one.
    """
    from support.kube import connect
    from support.tiers import skip_reason

    connected = connect()
    if connected is None:
        pytest.skip(skip_reason("cluster", "none answers; run hack/cluster/up and hack/cluster/images first"))
    return connected


@pytest.fixture(scope="session")
def local_cluster(cluster: Cluster) -> Cluster:
    """Return the cluster, whose node is this machine: a test sees its files and processes."""
    from support.tiers import skip_reason

    if not cluster.local:
        pytest.skip(skip_reason("local cluster", "the node is another machine; run hack/cluster/up"))
    return cluster


@pytest.fixture(scope="session")
def promtool() -> Promtool:
    """Return promtool with the prometheus binary from the same folder."""
    from support.prometheus import PrometheusMissing, Promtool
    from support.tiers import skip_reason

    try:
        return Promtool()
    except PrometheusMissing as missing:
        pytest.skip(skip_reason("prometheus", str(missing)))


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[str]:
    """Yield a namespace for the tests of one module. It is being deleted while the next module runs."""
    with cluster.namespace("test", wait=False) as name:
        yield name
