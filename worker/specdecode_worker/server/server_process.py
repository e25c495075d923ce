"""Server process: start-up and shutdown of the two HTTP listeners and the engine process.

start:     listen -> start the engine process, load the tokenizer -> engine warm -> ready
shutdown:  SIGTERM -> not ready, still serving -> new requests refused, running requests finish -> exit 0
failure:   the engine dies -> streams end with an error, /health fails -> exit 1
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import uvicorn
from fastapi import FastAPI

from specdecode_worker.capture import CaptureError, Recorder
from specdecode_worker.contract import Env, Plan, SyntheticKnobs, WorkerConfig
from specdecode_worker.engine.ipc.engine_client import EngineClient
from specdecode_worker.engine.ipc.engine_process import Build
from specdecode_worker.models.checkpoints import model_store
from specdecode_worker.models.errors import ModelError
from specdecode_worker.server.errors import BadRequest, CannotStart, ServerError
from specdecode_worker.server.lifecycle import Lifecycle, Shutdown
from specdecode_worker.server.plan_store import read_plan
from specdecode_worker.server.requests.body_parser import parse_contract
from specdecode_worker.server.routes.admin import admin_app
from specdecode_worker.server.routes.public import public_app
from specdecode_worker.server.served_model import Model
from specdecode_worker.server.service import Service
from specdecode_worker.server.text.tokenizer import Tokenizer
from specdecode_worker.termination import write_termination_message

# Time for open connections to read the data already written, after the last request has ended.
_FLUSH_SECONDS = 3
# Time for which probes and clients still get the reason of an engine failure before the process exits.
_FAILED_SECONDS = 1
# Longer than the connection pools of clients keep idle connections: the client then closes an idle connection first,
# and no request is sent on a connection that the server has just closed.
_KEEP_ALIVE_SECONDS = 75
_LOOPBACK = "127.0.0.1"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Signals:
    """Shutdown signals of the process.

    The first SIGTERM or SIGINT sets ``drain_requested`` (drain); each further signal sets ``exit_now`` (do not wait).
    """

    drain_requested: asyncio.Event
    exit_now: asyncio.Event

    @classmethod
    def installed(cls) -> Self:
        """Install the handlers for SIGTERM and SIGINT on the running event loop."""
        signals = cls(asyncio.Event(), asyncio.Event())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, signals._on_signal)
        return signals

    def _on_signal(self) -> None:
        (self.exit_now if self.drain_requested.is_set() else self.drain_requested).set()


class _Listener(uvicorn.Server):
    """uvicorn server without its own signal handlers, because `serve` controls the shutdown of this process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    config: WorkerConfig,
    standalone_plan: Plan | None = None,
    *,
    api_keys: Sequence[str] = (),
    build: Build | None = None,
) -> int:
    """Run the worker until it is asked to shut down or the engine dies.

    Args:
        config: Configuration of the worker.
        standalone_plan: Plan to start with when no usable plan is mounted.
        api_keys: API keys that are accepted in addition to those of the environment.
        build: Factory of the engine; tests of the server pass a fake engine.

    Returns:
        The exit code: 0 after a complete drain, 1 if requests were cut off or the engine died.

    Raises:
        CannotStart: A port is taken, or the model, the capture folder or the synthetic knobs are unusable.
    """
    signals = _Signals.installed()
    plan, knobs = _start_plan(config, standalone_plan), _start_knobs()
    token = os.environ.get(Env.admin_token)
    sockets = _bind(config, admin_host=config.server.host if token else _LOOPBACK)
    recorder = _recorder(config)
    engine = EngineClient(config, plan, knobs, build=build)
    try:
        lifecycle = Lifecycle()
        service = Service(config, engine, lifecycle, plan, recorder)
        shutdown = Shutdown(lifecycle, config.server, lambda: engine.in_flight, signals.exit_now)
        keys = (*os.environ.get(Env.api_keys, "").split(), *api_keys)
        apps = (public_app(service, keys), admin_app(service, shutdown, token))
        async with _listening(apps, sockets):
            with contextlib.closing(service):
                return await _run(service, shutdown, signals.drain_requested)
    finally:
        await engine.close()
        if recorder is not None:
            await asyncio.to_thread(recorder.close)


def _recorder(config: WorkerConfig) -> Recorder | None:
    """Open the capture recorder; None without capture configuration.

    Raises:
        CannotStart: The recorder cannot be opened. Serving without it would hide that no traffic is captured.
    """
    if config.capture is None:
        return None
    try:
        return Recorder(config.capture)
    except CaptureError as error:
        raise CannotStart(f"capture: {error}") from None


async def _run(service: Service, shutdown: Shutdown, drain_requested: asyncio.Event) -> int:
    """Load the model and serve until ``drain_requested`` is set or the engine is gone. Return the exit code.

    Raises:
        CannotStart: The tokenizer or the model cannot be loaded.
    """
    loading = asyncio.create_task(_load(service))
    drain = asyncio.create_task(drain_requested.wait())
    await asyncio.wait((loading, drain, service.engine.ended), return_when=asyncio.FIRST_COMPLETED)
    if loading.done() and loading.exception() is None and not service.engine.ended.done():
        await asyncio.wait((drain, service.engine.ended), return_when=asyncio.FIRST_COMPLETED)
    if drain.done():
        loading.cancel()
        return await _shut_down(service, shutdown)
    drain.cancel()
    if loading.done() and (error := loading.exception()) is not None:
        if isinstance(error, ServerError | ModelError):
            raise CannotStart(str(error)) from error
        raise error
    loading.cancel()
    return await _fail(service)


async def _load(service: Service) -> None:
    """Load the tokenizer in this process while the engine process loads the weights, then start to serve."""
    config = service.config
    tokenizer = await asyncio.to_thread(_tokenizer, config)
    loaded = await asyncio.shield(service.engine.loaded)
    service.model_loaded(Model(tokenizer, loaded))
    service.prompts.start()
    if loaded.draft_problem:
        log.warning("serving plainly, the draft does not fit: %s", loaded.draft_problem)
    log.info("ready: %s, at most %d tokens", config.model.served_name, loaded.max_model_len)


def _tokenizer(config: WorkerConfig) -> Tokenizer:
    return Tokenizer.from_folder(model_store.resolve(config.model.uri, Path(config.cache_dir)))


async def _shut_down(service: Service, shutdown: Shutdown) -> int:
    """Drain, end the streams that are left, and return the exit code."""
    log.info("leaving: %d requests are running", service.engine.in_flight)
    cut = await shutdown.begin()
    if cut:
        log.warning("%d requests were cut off", cut)
        service.engine.end_streams("this worker is shutting down")
    return 1 if cut or service.engine.ended.done() else 0


async def _fail(service: Service) -> int:
    """Report the loss of the engine and return exit code 1."""
    reason = service.engine.ended.result()
    log.error("the engine is gone: %s", reason)
    service.lifecycle.fail(reason)
    write_termination_message(reason)
    # Probes and clients get a response with the reason instead of a refused connection.
    await asyncio.sleep(_FAILED_SECONDS)
    return 1


@contextlib.asynccontextmanager
async def _listening(apps: tuple[FastAPI, FastAPI], sockets: list[socket.socket]) -> AsyncIterator[None]:
    """Serve both applications; on exit, give open connections time to read the data already written."""
    listeners = [
        _Listener(
            uvicorn.Config(
                app,
                access_log=False,
                log_config=None,
                log_level="warning",
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_FLUSH_SECONDS,
            )
        )
        for app in apps
    ]
    serving = [
        asyncio.create_task(listener.serve(sockets=[one])) for listener, one in zip(listeners, sockets, strict=True)
    ]
    try:
        yield
    finally:
        for listener in listeners:
            listener.should_exit = True
        await asyncio.gather(*serving)


def _start_plan(config: WorkerConfig, standalone_plan: Plan | None) -> Plan:
    """Return the mounted plan, else ``standalone_plan``, else an empty plan (no speculation rows)."""
    path = os.environ.get(Env.plan_path)
    mounted = read_plan(Path(path), config.deployment_uid) if path else None
    return mounted or standalone_plan or Plan(uid=config.deployment_uid)


def _start_knobs() -> SyntheticKnobs | None:
    """Read the synthetic knobs from the environment; None when it has none.

    Raises:
        CannotStart: The knobs are invalid. A test without its knobs would pass or fail for the wrong reason.
    """
    text = os.environ.get(Env.synthetic)
    if not text:
        return None
    try:
        knobs = parse_contract(SyntheticKnobs, text.encode())
    except BadRequest as error:
        raise CannotStart(f"${Env.synthetic}: {error}") from None
    log.warning("synthetic knobs are on: acceptance and step times are not what they look like")
    return knobs


def _bind(config: WorkerConfig, admin_host: str) -> list[socket.socket]:
    """Bind the public and the admin socket, before any slow part of the start.

    Raises:
        CannotStart: A port is taken or the address is not available.
    """
    server = config.server
    sockets = []
    for what, host, port in (("public", server.host, server.port), ("admin", admin_host, server.admin_port)):
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sockets.append(socket.create_server((host, port), family=family, backlog=2048))
        except OSError as error:
            raise CannotStart(f"cannot listen on {host}:{port} ({what} port): {error.strerror or error}") from None
        log.info("%s port: http://%s:%d", what, *sockets[-1].getsockname()[:2])
    return sockets
