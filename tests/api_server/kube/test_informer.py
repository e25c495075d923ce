"""Informers on a real API server: an object that leaves the selection, and a half-open connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import GROUP
from specdecode_operator.errors import Unavailable
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.informer import Informer
from specdecode_operator.kube.kinds import CONFIG_MAPS
from specdecode_operator.types import Key
from support.background import background
from support.kube import Cluster as Kubectl
from support.operators.kube_objects import config_map
from support.operators.tcp_proxy import TcpProxy
from support.waiting import eventually


@asynccontextmanager
async def running(client: KubeClient, namespace: str, parent: str) -> AsyncIterator[tuple[Informer[Any], list[Key]]]:
    """Run an informer of the ConfigMaps of one parent, after its first list."""
    changes = list[Key]()
    informer: Informer[Any] = Informer(
        client,
        CONFIG_MAPS,
        [namespace],
        labels=f"{GROUP}/name={parent}",
        project=lambda resource: (resource["metadata"]["uid"], resource.get("data")),
        metadata_only=False,
        on_change=changes.append,
    )
    async with background(informer.run()):
        await asyncio.wait_for(informer.synced.wait(), 10)
        yield informer, changes


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the kind of each list of an informer."""
    recorded: list[str] = []
    relist = Informer._relist

    async def recording(self: Informer[Any], source: Any) -> None:
        recorded.append(self._kind.kind)
        await relist(self, source)

    monkeypatch.setattr(Informer, "_relist", recording)
    return recorded


async def test_an_object_that_loses_its_label_leaves(api: KubeClient, namespace: str, cluster: Kubectl) -> None:
    await api.apply(config_map(namespace, "stripped", "label", a="1"), force=True)
    async with running(api, namespace, "label") as (informer, changes):
        cluster.kubectl("label", "configmap", "stripped", f"{GROUP}/name-", namespace=namespace)
        await eventually(lambda: not informer.of((namespace, "label")), 2)
        assert changes == [(namespace, "label")] * 2


async def test_a_half_open_connection_is_noticed_within_thirty_seconds(
    api: KubeClient, proxied: KubeClient, proxy: TcpProxy, namespace: str, lists: list[str]
) -> None:
    """Another request on a dead connection shows it, as a leader's and a candidate's do every two seconds."""
    async with running(proxied, namespace, "silent") as (informer, changes):
        await api.apply(config_map(namespace, "before", "silent"), force=True)
        await eventually(lambda: changes, 5)
        await proxied.get(CONFIG_MAPS, namespace, "before")
        proxy.silence_open_connections()
        contact = informer.last_contact
        await api.apply(config_map(namespace, "after", "silent"), force=True)
        await asyncio.sleep(1)
        assert informer.get(namespace, "after") is None, "the connection is not silent"
        with pytest.raises(Unavailable):
            await proxied.get(CONFIG_MAPS, namespace, "before")
        # 30 s on a quiet machine (benchmarks/reports/operator-faults-2026-11-27.md); other tests run at the same time.
        await eventually(lambda: informer.get(namespace, "after"), 25)
        assert lists == ["ConfigMap"]
        assert informer.last_contact > contact + 1
