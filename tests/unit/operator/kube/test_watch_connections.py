"""Informers over HTTP, from a server that ends, cuts, refuses and forgets watches. The client is the real one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from specdecode_operator.api.v1alpha1 import GROUP
from specdecode_operator.errors import Unavailable
from specdecode_operator.kube import client as client_module
from specdecode_operator.kube import informer as informer_module
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.informer import Informer
from specdecode_operator.kube.kinds import CONFIG_MAPS, LEASES
from support.background import background
from support.waiting import eventually

Watch = Callable[["Server", web.StreamResponse], Awaitable[None]]
"""Behavior of one watch, after its headers; it ends when this returns."""


def event(version: int, kind: str = "ADDED") -> bytes:
    labels = {f"{GROUP}/name": "a"}
    metadata = {"name": "p", "namespace": "ns", "uid": "u", "resourceVersion": str(version), "labels": labels}
    return json.dumps({"type": kind, "object": {"metadata": metadata}}).encode() + b"\n"


class Server:
    """API server with a script of watches; the last one is repeated."""

    def __init__(self, *watches: Watch | int) -> None:
        self.watches = list(watches)
        self.lists = 0
        self.versions: list[str] = []
        """Resource versions that watches began at."""
        self.lengths: list[int] = []

    async def config_maps(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            self.lists += 1
            return web.json_response({"metadata": {"resourceVersion": str(self.lists * 100)}, "items": []})
        self.versions.append(request.query["resourceVersion"])
        self.lengths.append(int(request.query["timeoutSeconds"]))
        assert request.query["allowWatchBookmarks"] == "true"
        step = self.watches.pop(0) if len(self.watches) > 1 else self.watches[0]
        if isinstance(step, int):
            return web.json_response({"kind": "Status", "code": step}, status=step)
        response = web.StreamResponse()
        await response.prepare(request)
        await step(self, response)
        return response

    async def leases(self, _: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()


async def cut(_: Server, response: web.StreamResponse) -> None:
    """Send an event, and break the connection."""
    await response.write(event(101))
    response._req.transport.abort()


async def forgotten(_: Server, response: web.StreamResponse) -> None:
    status = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
    await response.write(json.dumps(status).encode() + b"\n")


async def bookmarked(_: Server, response: web.StreamResponse) -> None:
    await response.write(event(150, "BOOKMARK"))


async def silent(_: Server, response: web.StreamResponse) -> None:
    await asyncio.sleep(60)


@asynccontextmanager
async def watching(server: Server) -> AsyncIterator[tuple[Informer[str], KubeClient]]:
    application = web.Application()
    application.router.add_get("/api/v1/namespaces/ns/configmaps", server.config_maps)
    application.router.add_get("/apis/coordination.k8s.io/v1/namespaces/ns/leases/l", server.leases)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    client = KubeClient(ApiClient(Configuration(host=f"http://127.0.0.1:{port}")), timeout_seconds=0.5)
    informer: Informer[str] = Informer(
        client,
        CONFIG_MAPS,
        ["ns"],
        labels="",
        project=lambda resource: resource["metadata"]["resourceVersion"],
        metadata_only=False,
        on_change=lambda key: None,
    )
    try:
        async with background(informer.run()):
            yield informer, client
    finally:
        await client.close()
        await runner.cleanup()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informer_module, "MIN_RETRY_SECONDS", 0.01)


async def test_watches_that_are_cut_refused_or_ended_go_on_where_they_were() -> None:
    server = Server(cut, 500, 503, 429, bookmarked, silent)
    async with watching(server) as (informer, _):
        await eventually(lambda: len(server.versions) == 6, 5)
    assert server.versions == ["100", "101", "101", "101", "101", "150"]
    assert server.lists == 1
    assert informer.get("ns", "p") == "101"
    assert min(server.lengths) >= 240, "a watch lasts minutes"


@pytest.mark.parametrize("forget", [forgotten, 410], ids=["event", "answer"])
async def test_a_forgotten_version_is_listed_again(forget: Watch | int) -> None:
    server = Server(cut, forget, silent)
    async with watching(server):
        await eventually(lambda: len(server.versions) == 3, 5)
    assert (server.versions, server.lists) == (["100", "101", "200"], 2)


async def test_a_watch_without_bookmarks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "QUIET_SECONDS", 0.2)
    monkeypatch.setattr(informer_module, "SHORT_WATCH_SECONDS", 0.1)
    server = Server(silent)
    async with watching(server):
        await eventually(lambda: len(server.versions) == 3, 5)
    assert (set(server.versions), server.lists) == ({"100"}, 1)


async def test_a_request_without_an_answer_puts_silent_watches_in_doubt() -> None:
    """A route that was lost takes all open connections; Leases are renewed every two seconds."""
    server = Server(silent)
    async with watching(server) as (_, client):
        await eventually(lambda: len(server.versions) == 1, 5)
        for _ in range(2):
            with pytest.raises(Unavailable):
                await client.get(LEASES, "ns", "l")
        await eventually(lambda: len(server.versions) == 2, 5)
        await asyncio.sleep(0.2)
    assert (server.versions, server.lists) == (["100", "100"], 1), "once in twenty seconds"
