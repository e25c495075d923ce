"""A router in this process, over stand-in workers, with a client for its port."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from specdecode_router.discovery.static import StaticDiscovery
from specdecode_router.frontend.state import RouterState
from specdecode_router.process import running_router
from specdecode_router.settings import RouterSettings
from support.stand_in_worker import TOKEN, Script, StandInWorker, running
from support.waiting import eventually


@dataclass
class RouterUnderTest:
    """A running router, its stand-ins, and a client."""

    state: RouterState
    workers: list[StandInWorker]
    client: aiohttp.ClientSession
    port: int

    async def post(self, path: str, **fields: Any) -> tuple[int, Mapping[str, str], bytes]:
        """Return status, headers and body of the answer to a POST. ``fields`` are those of aiohttp."""
        async with self.client.post(path, **fields) as response:
            return response.status, response.headers, await response.read()

    async def get(self, path: str, **fields: Any) -> tuple[int, Mapping[str, str], bytes]:
        """Return status, headers and body of the answer to a GET."""
        async with self.client.get(path, **fields) as response:
            return response.status, response.headers, await response.read()

    async def wait_for_reports(self) -> None:
        """Wait until the report of every stand-in was read."""
        await eventually(lambda: all(view.max_num_seqs for view in self.state.relay.workers.views()))


@contextlib.asynccontextmanager
async def router_over(*scripts: Script, demand: Any = None, **settings: Any) -> AsyncIterator[RouterUnderTest]:
    """Yield a router over one stand-in for each script."""
    async with routers_over(1, *scripts, demand=demand, **settings) as (router,):
        yield router


@contextlib.asynccontextmanager
async def routers_over(
    count: int, *scripts: Script, demand: Any = None, **settings: Any
) -> AsyncIterator[list[RouterUnderTest]]:
    """Yield routers over the same stand-ins, one for each script."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(running(StandInWorker(script))) for script in scripts]
        routers = [await stack.enter_async_context(_router(workers, demand, settings)) for _ in range(count)]
        yield routers


@contextlib.asynccontextmanager
async def _router(
    workers: list[StandInWorker], demand: Any, settings: Mapping[str, Any]
) -> AsyncIterator[RouterUnderTest]:
    async with contextlib.AsyncExitStack() as stack:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        values = {"max_silence_seconds": 2, "no_worker_seconds": 1, "load_seconds": 0.5, **settings}
        discovery = StaticDiscovery([worker.url for worker in workers])
        checked = RouterSettings.model_validate(values)
        made = running_router(checked, lambda: (TOKEN,), discovery, listener, demand)
        state = await stack.enter_async_context(made)
        client = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
        router = RouterUnderTest(state, workers, client, port)
        await router.wait_for_reports()
        yield router
