"""Discovery and demand on a real API server: changes in time, a lost connection, and the rights of a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from specdecode_router.discovery.api_server import ApiServer, ApiServerError
from specdecode_router.discovery.demand import DemandWriter
from specdecode_router.discovery.endpoint_slices import EndpointSliceDiscovery
from specdecode_router.workers.worker import Endpoint
from specdecode_worker.contract.demand import read_demand
from support.background import background
from support.kube import Cluster
from support.operators.tcp_proxy import TcpProxy
from support.waiting import eventually

SERVICE = "demo-workers"


def slice_of(*workers: str, name: str = "demo-workers-1", leaving: bool = False, service: str = SERVICE) -> Any:
    """Return an EndpointSlice as the endpoint controller writes it."""
    endpoints = [
        {
            "addresses": [f"10.0.0.{number + 1}"],
            "conditions": {"ready": not leaving, "serving": True, "terminating": leaving},
            "targetRef": {"kind": "Pod", "name": worker},
        }
        for number, worker in enumerate(workers)
    ]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "ports": [
            {"name": "http", "port": 8000, "protocol": "TCP"},
            {"name": "admin", "port": 8001, "protocol": "TCP"},
        ],
        "endpoints": endpoints,
    }


@asynccontextmanager
async def running(api: ApiServer, namespace: str) -> AsyncIterator[tuple[EndpointSliceDiscovery, list[list[Endpoint]]]]:
    updates = list[list[Endpoint]]()

    def update(endpoints: Sequence[Endpoint]) -> None:
        updates.append(list(endpoints))

    discovery = EndpointSliceDiscovery(api, namespace, SERVICE)
    async with background(discovery.run(update)):
        await eventually(lambda: updates, 10)
        yield discovery, updates


async def applied(cluster: Cluster, namespace: str, manifest: Any) -> None:
    await asyncio.to_thread(cluster.apply, manifest, namespace=namespace)


async def test_workers_that_come_and_go_are_reported_within_two_seconds(
    direct: ApiServer, cluster: Cluster, namespace: str
) -> None:
    await applied(cluster, namespace, slice_of("a"))
    await applied(cluster, namespace, slice_of("x", name="other", service="other"))
    async with running(direct, namespace) as (_, updates):
        assert updates == [[Endpoint("a", "http://10.0.0.1:8001")]]
        await applied(cluster, namespace, slice_of("a", "b"))
        await eventually(lambda: [one.name for one in updates[-1]] == ["a", "b"], 2)
        await applied(cluster, namespace, slice_of("a", leaving=True))
        await eventually(lambda: updates[-1][0].terminating, 2)
        await asyncio.to_thread(cluster.kubectl, "delete", "endpointslice", "demo-workers-1", namespace=namespace)
        await eventually(lambda: updates[-1] == [], 2)


async def test_a_half_open_connection_is_noticed_and_the_list_stays(
    proxied: ApiServer, proxy: TcpProxy, cluster: Cluster, namespace: str
) -> None:
    await applied(cluster, namespace, slice_of("a"))
    async with running(proxied, namespace) as (_, updates):
        proxy.silence_open_connections()
        await applied(cluster, namespace, slice_of("a", "b"))
        await asyncio.sleep(1)
        assert len(updates) == 1, "the connection is not silent"
        # A watch of 18 s, its grace of 3 s and the first pause; other tests run at the same time as this one.
        await eventually(lambda: len(updates[-1]) == 2, 30)
        assert len(updates) == 2, "the list was never empty"


async def test_a_refused_watch_says_why(direct: ApiServer, namespace: str) -> None:
    with pytest.raises(ApiServerError, match=r"resource ?[vV]ersion"):
        await anext(direct.watch_slices(namespace, SERVICE, "not-a-version", 1))


async def test_two_routers_write_entries_of_their_own(direct: ApiServer, cluster: Cluster, namespace: str) -> None:
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "demo-demand"}}
    await applied(cluster, namespace, manifest)
    writers = [DemandWriter(direct, namespace, "demo-demand", router) for router in ("a", "b")]

    async def held() -> dict[str, int]:
        entries = read_demand(await direct.config_map_data(namespace, "demo-demand"))
        return {router: entry.requests for router, entry in entries.items()}

    async with background(*(writer.run() for writer in writers)):
        writers[0].set_held(3, 1)
        writers[1].set_held(2, 1)
        await asyncio.sleep(2)
        assert await held() == {"a": 3, "b": 2}
        writers[0].set_held(0, 0)
        await asyncio.sleep(1.5)
        assert await held() == {"b": 2}
