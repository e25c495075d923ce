"""Client of the API server: errors by class, guarded writes, evictions, watches and deadlines."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import GROUP
from specdecode_operator.errors import Conflict, EvictionBlocked, NotLeader, Refused, Unavailable
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import CONFIG_MAPS, PODS
from specdecode_operator.kube.leader_election import LeaderElector
from support.background import background
from support.kube import Cluster as Kubectl
from support.operators.kube_objects import config_map
from support.operators.tcp_proxy import TcpProxy
from support.waiting import eventually

WORKER_LABEL = f"{GROUP}/role=worker"


async def test_errors_have_a_class_each(api: KubeClient, namespace: str) -> None:
    assert await api.get(CONFIG_MAPS, namespace, "absent") is None
    assert await api.get(CONFIG_MAPS, namespace, "absent", metadata_only=True) is None
    await api.create(CONFIG_MAPS, config_map(namespace, "once"))
    with pytest.raises(Conflict):
        await api.create(CONFIG_MAPS, config_map(namespace, "once"))
    with pytest.raises(Refused, match="lowercase RFC 1123"):
        await api.create(CONFIG_MAPS, config_map(namespace, "Not A Name"))


async def test_metadata_has_no_data(api: KubeClient, namespace: str) -> None:
    await api.apply(config_map(namespace, "large", a="x" * 1000), force=True)
    resource = await api.get(CONFIG_MAPS, namespace, "large", metadata_only=True)
    assert resource["metadata"]["name"] == "large"
    assert "data" not in resource


async def test_apply_means_the_object_with_that_uid(api: KubeClient, namespace: str, cluster: Kubectl) -> None:
    made = await api.apply(config_map(namespace, "precise", a="1"), force=False)
    uid = made["metadata"]["uid"]
    applied = await api.apply(config_map(namespace, "precise", a="2"), force=True, uid=uid)
    assert (applied["data"], applied["metadata"]["uid"]) == ({"a": "2"}, uid)
    with pytest.raises(Conflict):
        await api.apply(config_map(namespace, "precise", a="3"), force=True, uid="00000000-0000-0000-0000-000000000000")
    cluster.kubectl("delete", "configmap", "precise", namespace=namespace)
    with pytest.raises(Conflict):
        await api.apply(config_map(namespace, "precise", a="3"), force=True, uid=uid)
    assert await api.get(CONFIG_MAPS, namespace, "precise") is None


async def test_apply_without_force_takes_no_field(api: KubeClient, namespace: str, cluster: Kubectl) -> None:
    cluster.apply(config_map(namespace, "theirs", a="1"), server_side=True)
    with pytest.raises(Conflict, match=r"data\.a"):
        await api.apply(config_map(namespace, "theirs", a="2"), force=False)
    assert cluster.get("configmap", "theirs", namespace)["data"] == {"a": "1"}


def pod(name: str, **spec: Any) -> dict[str, Any]:
    """Return a pod that is never scheduled."""
    containers = [{"name": "worker", "image": "none"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"schedulerName": "none", "containers": containers, "terminationGracePeriodSeconds": 0, **spec},
    }


async def test_a_disruption_budget_blocks_an_eviction(api: KubeClient, namespace: str, cluster: Kubectl) -> None:
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "strict"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "guarded"}}},
    }
    cluster.apply(budget, pod("guarded"), pod("free"), namespace=namespace)
    status = json.dumps({"status": {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"}})
    patch = ("patch", "pod", "guarded", "--subresource=status", "--type=merge", "-p", status)
    cluster.kubectl(*patch, namespace=namespace)
    uids = {name: cluster.get("pod", name, namespace)["metadata"]["uid"] for name in ("guarded", "free")}
    with pytest.raises(EvictionBlocked, match="strict"):
        await api.evict(namespace, "guarded", uids["guarded"])
    api.timeout_seconds = 30  # the API server tries for 10 s
    with pytest.raises(Conflict):
        await api.evict(namespace, "free", uids["guarded"])
    await api.evict(namespace, "free", uids["free"])
    assert await api.get(PODS, namespace, "free") is None
    await api.evict(namespace, "free", uids["free"])  # one that is gone is no error
    cluster.kubectl("delete", "pod", "guarded", "--wait=false", namespace=namespace)


async def test_watch_yields_events_of_any_size(api: KubeClient, namespace: str) -> None:
    version = (await api.list(CONFIG_MAPS, namespace, labels=WORKER_LABEL))["metadata"]["resourceVersion"]
    seen: list[tuple[str, str]] = []

    async def watch() -> None:
        stream = api.watch(CONFIG_MAPS, namespace, labels=WORKER_LABEL, version=version, metadata_only=False)
        async for event, resource in stream:
            seen.append((event, resource["metadata"]["name"]))
            if len(seen) == 2:
                return

    task = asyncio.create_task(watch())
    await api.apply(config_map(namespace, "seen", a="x" * 200_000), force=True)
    await api.apply(config_map(namespace, "seen", a="2"), force=True)
    await asyncio.wait_for(task, 10)
    assert seen == [("ADDED", "seen"), ("MODIFIED", "seen")]


async def test_an_absent_api_server_is_unavailable(api: KubeClient) -> None:
    api._api.configuration.host = "https://127.0.0.1:9"
    with pytest.raises(Unavailable):
        await api.get(CONFIG_MAPS, "default", "any")


@pytest.mark.parametrize("reused", [True, False])
async def test_a_silent_connection_ends_at_the_deadline(
    proxied: KubeClient, proxy: TcpProxy, namespace: str, reused: bool
) -> None:
    if reused:
        await proxied.get(CONFIG_MAPS, namespace, "any")
    proxied.timeout_seconds = 1
    proxy.silence_all()
    started = time.monotonic()
    with pytest.raises(Unavailable):
        await proxied.get(CONFIG_MAPS, namespace, "any")
    assert time.monotonic() - started < 3


# Leader election on a real API server: hand-over, and a leader that is cut off.


async def test_a_leader_that_is_cut_off_writes_nothing_more(
    api: KubeClient, proxied: KubeClient, proxy: TcpProxy, namespace: str
) -> None:
    first = LeaderElector(proxied, namespace=namespace, name="cut-off", identity="first")
    second = LeaderElector(api, namespace=namespace, name="cut-off", identity="second")
    proxied.guard = first.check
    async with background(first.run()):
        await asyncio.wait_for(first.wait_until_leader(), 5)
        async with background(second.run()):
            await proxied.create(CONFIG_MAPS, config_map(namespace, "written"))
            proxy.silence_all()
            cut = time.monotonic()
            await asyncio.wait_for(first.lost.wait(), 12.5)
            with pytest.raises(NotLeader):
                await proxied.create(CONFIG_MAPS, config_map(namespace, "refused"))
            assert not second.is_leader, "the first one stops before the second one starts"
            await eventually(lambda: second.is_leader, 20 - (time.monotonic() - cut))
            assert await api.get(CONFIG_MAPS, namespace, "refused") is None
