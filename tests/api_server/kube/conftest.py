"""Connections to the API server, direct and through a TCP proxy that can fail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube import Cluster
from tcp_proxy import TcpProxy

from specdecode_operator.kube.client import KubeClient


@pytest.fixture
async def api(cluster: Cluster) -> AsyncIterator[KubeClient]:
    """Yield a client of the API server."""
    client = await KubeClient.connect(cluster.kubeconfig)
    yield client
    await client.close()


@pytest.fixture
async def proxy(cluster: Cluster) -> AsyncIterator[TcpProxy]:
    """Yield a TCP proxy before the API server."""
    server = _kubeconfig(cluster)["clusters"][0]["cluster"]["server"]
    host, _, port = server.removeprefix("https://").rpartition(":")
    async with TcpProxy(host, int(port)) as running:
        yield running


@pytest.fixture
async def proxied(cluster: Cluster, proxy: TcpProxy, tmp_path: Path) -> AsyncIterator[KubeClient]:
    """Yield a client that is connected through the proxy."""
    kubeconfig = _kubeconfig(cluster)
    server = kubeconfig["clusters"][0]["cluster"]
    server["server"] = f"https://127.0.0.1:{proxy.port}"
    server["tls-server-name"] = proxy.host
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(kubeconfig))
    client = await KubeClient.connect(str(path))
    yield client
    await client.close()


def _kubeconfig(cluster: Cluster) -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten"))
    return parsed
