"""Connections to the API server have keepalive."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from specdecode_operator.kube import client as connection
from specdecode_operator.kube.client import KubeClient, keepalive_socket
from specdecode_operator.kube.kinds import CONFIG_MAPS
from support.kube import Cluster


async def test_connections_to_the_api_server_have_keepalive(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    def recording(address: tuple[Any, ...]) -> socket.socket:
        made.append(keepalive_socket(address))
        return made[-1]

    monkeypatch.setattr(connection, "keepalive_socket", recording)
    client = await KubeClient.connect(cluster.kubeconfig)
    await client.get(CONFIG_MAPS, "default", "absent")
    await client.close()
    assert len(made) == 1
