"""Router's client of the API server, direct and through a TCP proxy that can fail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube import Cluster
from tcp_proxy import TcpProxy

from specdecode_router.discovery.api_server import ApiServer


@pytest.fixture
async def direct(cluster: Cluster, tmp_path: Path) -> AsyncIterator[ApiServer]:
    """Yield a client of the API server."""
    path = tmp_path / "direct"
    path.write_text(yaml.safe_dump(_kubeconfig(cluster)))
    api = await ApiServer.connect(str(path))
    yield api
    await api.close()


@pytest.fixture
async def proxy(cluster: Cluster) -> AsyncIterator[TcpProxy]:
    """Yield a TCP proxy before the API server."""
    server = _kubeconfig(cluster)["clusters"][0]["cluster"]["server"]
    host, _, port = server.removeprefix("https://").rpartition(":")
    async with TcpProxy(host, int(port)) as running:
        yield running


@pytest.fixture
async def proxied(cluster: Cluster, proxy: TcpProxy, tmp_path: Path) -> AsyncIterator[ApiServer]:
    """Yield a client that is connected through the proxy."""
    kubeconfig = _kubeconfig(cluster)
    server = kubeconfig["clusters"][0]["cluster"]
    server["server"] = f"https://127.0.0.1:{proxy.port}"
    server["tls-server-name"] = proxy.host
    path = tmp_path / "proxied"
    path.write_text(yaml.safe_dump(kubeconfig))
    api = await ApiServer.connect(str(path))
    yield api
    await api.close()


def _kubeconfig(cluster: Cluster) -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten"))
    return parsed
