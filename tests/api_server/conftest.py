"""Fixtures of the tests against a real API server: support of the operator's unit tests, and a TCP proxy."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from support.kube import Cluster
    from support.operators.tcp_proxy import TcpProxy


@pytest.fixture
def kubeconfig(cluster: Cluster) -> dict[str, Any]:
    """Return the connection of the cluster with its certificates, parsed."""
    parsed: dict[str, Any] = yaml.safe_load(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten"))
    return parsed


@pytest.fixture
def proxy(kubeconfig: dict[str, Any]) -> Iterator[TcpProxy]:
    """Yield a TCP proxy before the API server, which can fail."""
    from support.operators.tcp_proxy import TcpProxy

    server = kubeconfig["clusters"][0]["cluster"]["server"]
    host, _, port = server.removeprefix("https://").rpartition(":")
    made = TcpProxy(host, int(port))
    yield made
    made.close()


@pytest.fixture
def proxied_kubeconfig(kubeconfig: dict[str, Any], proxy: TcpProxy, tmp_path: Path) -> Path:
    """Return the file of a connection through the proxy."""
    through = deepcopy(kubeconfig)
    server = through["clusters"][0]["cluster"]
    server["server"] = f"https://127.0.0.1:{proxy.port}"
    server["tls-server-name"] = proxy.host
    path = tmp_path / "proxied"
    path.write_text(yaml.safe_dump(through))
    return path
