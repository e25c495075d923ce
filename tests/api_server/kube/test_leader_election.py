"""Leader election on a real API server: hand-over, and a leader that is cut off."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from specdecode_operator.errors import NotLeader
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import CONFIG_MAPS
from specdecode_operator.kube.leader_election import LeaderElector
from support.kube import Cluster
from support.operators.kube_objects import config_map, seconds_until
from support.operators.tcp_proxy import TcpProxy


def start(client: KubeClient, namespace: str, lease: str, identity: str) -> tuple[LeaderElector, asyncio.Task[Any]]:
    elector = LeaderElector(client, namespace=namespace, name=lease, identity=identity)
    return elector, asyncio.create_task(elector.run())


async def stop(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(("released", "limit"), [(False, 20), (True, 5)])
async def test_one_leads_and_the_other_takes_over(
    api: KubeClient, namespace: str, cluster: Cluster, released: bool, limit: float
) -> None:
    lease = f"hand-over-{released}".lower()
    first, first_task = start(api, namespace, lease, "first")
    await asyncio.wait_for(first.wait_until_leader(), 5)
    second, second_task = start(api, namespace, lease, "second")
    for _ in range(10):
        await asyncio.sleep(0.5)
        assert (first.is_leader, second.is_leader) == (True, False)
    await stop(first_task)
    if released:
        await first.release()
    await seconds_until("the second one leads", lambda: second.is_leader, limit=limit)
    assert not first.is_leader
    spec = cluster.get("lease", lease, namespace)["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"], spec["leaseDurationSeconds"]) == ("second", 1, 15)
    await stop(second_task)


async def test_a_leader_that_is_cut_off_writes_nothing_more(
    api: KubeClient, proxied: KubeClient, proxy: TcpProxy, namespace: str
) -> None:
    first, first_task = start(proxied, namespace, "cut-off", "first")
    proxied.guard = first.check
    await asyncio.wait_for(first.wait_until_leader(), 5)
    second, second_task = start(api, namespace, "cut-off", "second")
    await proxied.create(CONFIG_MAPS, config_map(namespace, "written"))
    proxy.silence_all()
    cut = time.monotonic()
    await asyncio.wait_for(first.lost.wait(), 12.5)
    with pytest.raises(NotLeader):
        await proxied.create(CONFIG_MAPS, config_map(namespace, "refused"))
    assert not second.is_leader, "the first one stops before the second one starts"
    await seconds_until("the second one leads", lambda: second.is_leader, limit=20 - (time.monotonic() - cut))
    assert await api.get(CONFIG_MAPS, namespace, "refused") is None
    await stop(first_task, second_task)
