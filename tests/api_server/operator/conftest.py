"""The resource's kind and the operator, each once for a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.kube import Cluster
from support.operators.operator_process import OperatorProcess, install_crd


@pytest.fixture(scope="module")
def crd(cluster: Cluster) -> None:
    install_crd(cluster)


@pytest.fixture(scope="module")
def operator(
    crd: None, cluster: Cluster, namespace: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """Yield the operator, which runs for a namespace."""
    with OperatorProcess(cluster, namespace, tmp_path_factory.mktemp("operator")) as process:
        yield process
