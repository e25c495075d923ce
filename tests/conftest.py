"""Fixtures that every suite may use. A suite that needs a cluster asks for `cluster` or `namespace`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))  # tests import `kube` from there
# tests/kernels runs kernels through Triton's interpreter. Triton decides when it is first imported, which others do too
# (transformers); tests/gpu, which compiles, is run by itself with 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

from kube import Cluster, connect
from prometheus import PrometheusMissing, Promtool


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster to test on. `make test` always has one; without it, tests by hand are skipped, loudly."""
    found = connect()
    if found is None:
        message = "no cluster answers: run hack/cluster/up and hack/cluster/images first"
        if os.environ.get("SPECDECODE_REQUIRE_CLUSTER"):
            pytest.fail(message)
        pytest.skip(message)
    return found


@pytest.fixture(scope="session")
def promtool() -> Promtool:
    """promtool, with prometheus beside it; `make test` insists on them."""
    try:
        return Promtool()
    except PrometheusMissing as missing:
        if os.environ.get("SPECDECODE_REQUIRE_CLUSTER"):
            pytest.fail(str(missing))
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace for this run alone: whatever else lives on the cluster is not touched."""
    with cluster.namespace("test") as name:
        yield name
