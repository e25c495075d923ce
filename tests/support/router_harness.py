"""A router in this process, or one relay alone, over stand-in workers, with a client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from specdecode_router.discovery.static import StaticDiscovery
from specdecode_router.frontend.state import RouterState
from specdecode_router.process import running_router
from specdecode_router.relay.context import RelayContext
from specdecode_router.relay.relay import Relay
from specdecode_router.relay.silence_monitor import SilenceMonitor
from specdecode_router.settings import RouterSettings
from specdecode_router.telemetry.metrics import RouterMetrics
from specdecode_router.workers.client import WorkerClient
from specdecode_router.workers.registry import WorkerRegistry
from specdecode_router.workers.worker import Endpoint, WorkerView
from specdecode_worker.contract.internal_stream import End, Open, OpenStream, Step
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
async def router_over(*scripts: Script, **settings: Any) -> AsyncIterator[RouterUnderTest]:
    """Yield a router over one stand-in for each script."""
    async with routers_over(1, *scripts, **settings) as (router,):
        yield router


@contextlib.asynccontextmanager
async def routers_over(count: int, *scripts: Script, **settings: Any) -> AsyncIterator[list[RouterUnderTest]]:
    """Yield routers over the same stand-ins, one for each script. ``settings`` are theirs, and their ``demand``."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(running(StandInWorker(script))) for script in scripts]
        routers = [await stack.enter_async_context(_router(workers, **settings)) for _ in range(count)]
        yield routers


@contextlib.asynccontextmanager
async def _router(
    workers: list[StandInWorker], *, demand: Any = None, **settings: Any
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


LIMITS = RouterSettings(
    open_seconds=0.5,
    no_worker_seconds=0.5,
    hold_seconds=1.5,
    max_refusals=3,
    max_crashes=2,
    min_silence_seconds=0.3,
    max_silence_seconds=0.6,
)


class FirstInOrder:
    """Choice of the first worker by name, so that tests know which one gets the first attempt."""

    def choose(self, views: Sequence[WorkerView], key: str, exclude: frozenset[str]) -> WorkerView | None:
        usable = [view for view in views if view.endpoint.name not in exclude]
        if key:
            usable = [view for view in usable if view.compatibility_key in ("", key)]
        return min(usable, key=lambda view: (view.suspect, view.endpoint.name), default=None)

    def record_end(self, worker: str, end: End) -> None: ...


@dataclass
class RecordingClient:
    opened: list[Open] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)
    body: bytes | None = None
    write_seconds: float = 0.0
    """Time for which the client has too much to read after every write."""

    def accepts(self, opened: Open) -> bool:
        return True

    async def open(self, opened: Open) -> None:
        self.opened.append(opened)

    async def write(self, step: Step) -> None:
        self.events.append(step.events)

    async def drain(self) -> None:
        if self.write_seconds:
            await asyncio.sleep(self.write_seconds)

    async def end(self, body: bytes) -> None:
        self.body = body

    def text(self, choice: int = 0) -> str:
        text = ""
        for event in self.events:
            (one,) = json.loads(event.removeprefix(b"data: "))["choices"]
            text += one["delta"]["content"] if one["index"] == choice else ""
        return text


@dataclass
class Harness:
    """Stand-ins by the names w0, w1, ... and the parts around a relay."""

    workers: list[StandInWorker]
    registry: WorkerRegistry
    context: RelayContext
    client: RecordingClient = field(default_factory=RecordingClient)

    @property
    def scripts(self) -> list[Script]:
        return [worker.script for worker in self.workers]

    def relay(self, body: bytes, seconds: float = 20.0) -> Relay:
        request = OpenStream(route="/v1/chat/completions", body=body, request_id="r1")
        deadline = time.monotonic() + seconds
        return Relay(self.context, request, self.client, FirstInOrder(), deadline, {"traceparent": "t"})

    async def run(self, body: bytes, seconds: float = 20.0) -> RecordingClient:
        await self.relay(body, seconds).run()
        return self.client

    def metric(self, name: str, **labels: str) -> float:
        """Return a value of the router's metrics; 0 if it is absent."""
        return self.context.metrics.registry.get_sample_value(f"specdecode_router_{name}", labels) or 0.0

    async def settled(self) -> None:
        """Wait until no stream runs at any worker."""
        await eventually(lambda: not any(worker.running for worker in self.workers))


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [], "stream": True, **fields}).encode()


@contextlib.asynccontextmanager
async def harness(*scripts: Script, cooldown_seconds: float = 0.2) -> AsyncIterator[Harness]:
    """Yield a harness with one stand-in for each script."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(running(StandInWorker(script))) for script in scripts]
        registry = WorkerRegistry(time.monotonic, cooldown_seconds)
        registry.update([Endpoint(f"w{index}", worker.url) for index, worker in enumerate(workers)])
        client = WorkerClient(lambda url: (TOKEN,), connect_seconds=0.5)
        stack.push_async_callback(client.close)
        monitor = SilenceMonitor(time.monotonic)
        context = RelayContext(registry, client, monitor, LIMITS, RouterMetrics(), time.monotonic)
        sweeps = asyncio.create_task(monitor.run())
        stack.callback(sweeps.cancel)
        yield Harness(workers, registry, context)
