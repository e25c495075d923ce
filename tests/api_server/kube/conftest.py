"""Connections to the API server, direct and through a TCP proxy that can fail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specdecode_operator.kube.client import KubeClient
from support.kube import Cluster


@pytest.fixture
async def api(cluster: Cluster) -> AsyncIterator[KubeClient]:
    client = await KubeClient.connect(cluster.kubeconfig)
    yield client
    await client.close()


@pytest.fixture
async def proxied(proxied_kubeconfig: Path) -> AsyncIterator[KubeClient]:
    client = await KubeClient.connect(str(proxied_kubeconfig))
    yield client
    await client.close()
