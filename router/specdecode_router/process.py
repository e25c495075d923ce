"""Router process: start, the loops that run next to requests, and the shutdown.

start:     listen -> find workers, read their loads -> ready at once; requests without a worker are held
shutdown:  SIGTERM -> not ready, still serving -> new requests refused, running requests finish -> exit 0
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from specdecode_router.discovery.demand import DemandWriter
from specdecode_router.discovery.endpoint_slices import Discovery
from specdecode_router.discovery.sources import open_sources
from specdecode_router.errors import CannotStart
from specdecode_router.frontend.lifecycle import Lifecycle
from specdecode_router.frontend.state import RouterState
from specdecode_router.listening import bind, end_process_on_error, listening, raise_file_limit
from specdecode_router.placement.placement_state import PlacementState
from specdecode_router.placement.traffic_split import TrafficSplit
from specdecode_router.queueing.admission import Admission
from specdecode_router.queueing.tenants import TenantTable
from specdecode_router.relay.context import RelayContext
from specdecode_router.relay.silence_monitor import SilenceMonitor
from specdecode_router.settings import LiveSettings, RouterSettings
from specdecode_router.telemetry.metrics import RouterMetrics
from specdecode_router.workers.client import TokenFile, WorkerClient
from specdecode_router.workers.load_poller import LoadPoller
from specdecode_router.workers.registry import WorkerRegistry
from specdecode_router.workers.worker import Endpoint
from specdecode_worker.contract import Env
from specdecode_worker.http_edge import BodyBudget, ReloadedFiles, TlsCertificate

log = logging.getLogger(__name__)

_FILE_CHECK_SECONDS = 1.0
"""Time between two examinations of files that may change."""


async def serve(settings: RouterSettings) -> int:
    """Run the router until SIGTERM or SIGINT. Return 0 if all requests finished, 1 if some were cut off.

    Raises:
        CannotStart: A port is taken, or there is no token.
        UnusableFiles: A file of tokens, certificates, keys or settings is unusable.
    """
    stop, stop_now = _signals()
    tokens = _tokens(settings)
    listener = bind(settings)
    raise_file_limit(settings.max_connections)
    # Modules and classes stay for ever; without this every full collection walks them and delays all streams.
    gc.collect()
    gc.freeze()
    async with (
        open_sources(settings) as (discovery, demand),
        running_router(settings, tokens, discovery, listener, demand) as state,
    ):
        await stop.wait()
        log.info("leaving: %d requests are running", state.lifecycle.running)
        return await _shut_down(state, stop_now)


@contextlib.asynccontextmanager
async def running_router(
    settings: RouterSettings,
    tokens: Callable[[], Sequence[str]],
    discovery: Discovery,
    listener: socket.socket,
    demand: DemandWriter | None = None,
) -> AsyncIterator[RouterState]:
    """Run a router on a bound socket during the block.

    Args:
        settings: Settings of the router.
        tokens: Returns the admin tokens, the current one first.
        discovery: Source of workers.
        listener: Socket of the port.
        demand: Writer of held requests; None without an operator.

    Raises:
        UnusableFiles: A file of tokens, certificates, keys or settings is unusable.
    """
    router = f"{os.environ.get(Env.pod_name) or socket.gethostname()}:{listener.getsockname()[1]}"
    registry = WorkerRegistry(time.monotonic, settings.failure_cooldown_seconds, router)
    backend_tokens = {
        one.name: TokenFile(one.token_file, required=False) for one in settings.backends if one.token_file
    }
    own_tokens: dict[str, Callable[[], Sequence[str]]] = {}
    client = WorkerClient(
        lambda url: own_tokens.get(url, tokens)(), connect_seconds=settings.connect_seconds, ca_file=settings.ca_file
    )
    certificate = TlsCertificate.of_files(settings.tls_cert_file, settings.tls_key_file)
    live = LiveSettings(settings)
    settings = live.current
    monitor = SilenceMonitor(time.monotonic)
    relay = RelayContext(registry, client, monitor, settings, RouterMetrics(), time.monotonic)
    state = _state(settings, relay)
    registry.on_change = lambda: state.admission.set_capacity(registry.capacity)
    registry.on_leave = state.placement.prefixes.remove_worker
    registry.has_share = lambda deployment: state.placement.split.has_share(deployment)

    def update(endpoints: Sequence[Endpoint]) -> None:
        """Take the workers, and the tokens of each deployment that has some of its own."""
        own_tokens.clear()
        own_tokens.update((one.admin_url, own) for one in endpoints if (own := backend_tokens.get(one.deployment)))
        registry.update(endpoints)

    loops = [
        discovery.run(update),
        LoadPoller(registry, client, settings.load_seconds, router, lambda: state.admission.waiting > 0).run(),
        state.relay.monitor.run(),
        _refresh(
            (tokens, client.ca, certificate, *backend_tokens.values(), state.tenants, live), lambda: _apply(live, state)
        ),
    ]
    if demand is not None:
        loops += [demand.run(), _report_held(state.admission, registry, demand)]
    try:
        async with _running(loops), listening(state, listener, certificate):
            yield state
    finally:
        await client.close()


async def _shut_down(state: RouterState, stop_now: asyncio.Event) -> int:
    settings = state.settings
    leaving = asyncio.create_task(
        state.lifecycle.shut_down(settings.endpoint_delay_seconds, settings.grace_period_seconds)
    )
    at_once = asyncio.create_task(stop_now.wait())
    await asyncio.wait((leaving, at_once), return_when=asyncio.FIRST_COMPLETED)
    for task in (leaving, at_once):
        task.cancel()
    if state.lifecycle.running:
        log.warning("%d requests were cut off", state.lifecycle.running)
    return 1 if state.lifecycle.running else 0


def _split(settings: RouterSettings) -> TrafficSplit:
    return TrafficSplit(settings.deployment, {one.name: one.percent for one in settings.backends})


def _apply(live: LiveSettings, state: RouterState) -> None:
    """Use changed settings for the requests that come from now on."""
    state.relay.limits = state.admission.limits = live.current
    if (split := _split(live.current)).percents != state.placement.split.percents:
        state.placement.split = split
        state.admission.set_capacity(state.relay.workers.capacity)


def _state(settings: RouterSettings, relay: RelayContext) -> RouterState:
    admission = Admission(settings, time.monotonic, relay.workers.tenant_limit)
    return RouterState(
        settings=settings,
        relay=relay,
        admission=admission,
        tenants=TenantTable(Path(settings.api_keys_path) if settings.api_keys_path else None),
        placement=PlacementState(split=_split(settings)),
        lifecycle=Lifecycle(),
        bodies=BodyBudget(settings.max_unfinished_body_bytes),
        clock=time.monotonic,
    )


@contextlib.asynccontextmanager
async def _running(loops: list[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run loops during the block. If one fails, the process ends: it would serve, but decide by old data."""
    tasks = [asyncio.create_task(one) for one in loops]
    for task in tasks:
        task.add_done_callback(end_process_on_error)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Install handlers for SIGTERM and SIGINT. The first sets the first event, each further one the second."""
    first, further = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (further if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return first, further


def _tokens(settings: RouterSettings) -> Callable[[], Sequence[str]]:
    if settings.admin_token_file is not None:
        return TokenFile(settings.admin_token_file)
    fixed = os.environ.get(Env.admin_token, "").strip()
    if not fixed:
        raise CannotStart(f"set ${Env.admin_token} or --admin-token-file to a token of the scope router")
    return lambda: (fixed,)


async def _refresh(sources: Iterable[object], on_refresh: Callable[[], None]) -> None:
    """Read changed files again, in a thread: a file system that hangs must not stop the event loop."""
    files = [one for one in sources if isinstance(one, ReloadedFiles)]
    while True:
        await asyncio.sleep(_FILE_CHECK_SECONDS)
        for one in files:
            try:
                await asyncio.to_thread(one.refresh)
            except Exception:
                log.exception("a file cannot be read again; the last content stays in use")
        on_refresh()


async def _report_held(admission: Admission, registry: WorkerRegistry, demand: DemandWriter) -> None:
    """Pass the number of requests without a worker on: at once when it changes in the queue, and once a second."""

    def report() -> None:
        stranded, oldest_seconds = registry.demand
        demand.set_held(admission.held + stranded, max(admission.oldest_held_seconds, oldest_seconds))

    admission.on_held_change = report
    while True:
        report()
        await asyncio.sleep(1)
