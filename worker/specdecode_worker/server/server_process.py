"""Server process: start-up and shutdown of the two HTTP listeners and the engine process.

start:     listen -> start the engine process, load the tokenizer -> engine warm -> ready
shutdown:  SIGTERM or drain -> not ready, still serving -> new requests refused, running requests finish -> exit 0
failure:   the engine or another vital part dies -> streams end with an error, /health fails -> exit 1
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specdecode_worker.contract import Env, Plan, SyntheticKnobs, WorkerConfig
from specdecode_worker.engine.client import EngineClient
from specdecode_worker.engine.process import Build
from specdecode_worker.http_edge import TlsCertificate, listen
from specdecode_worker.models import fetch as model_store
from specdecode_worker.models.errors import ConfigMismatch, ModelError
from specdecode_worker.models.fields import sampling_defaults
from specdecode_worker.server.admission import Model, load_credentials
from specdecode_worker.server.errors import BadRequest, CannotStart, ServerError
from specdecode_worker.server.listening import (
    ExitDeadline,
    GracefulShutdown,
    Lifecycle,
    VitalParts,
    listening,
    watch_engine,
)
from specdecode_worker.server.request_capture import close_recorder, open_recorder
from specdecode_worker.server.requests import CompletionRequest, parse_contract
from specdecode_worker.server.routes.admin import admin_app
from specdecode_worker.server.routes.public import public_app
from specdecode_worker.server.service import Service, read_plan
from specdecode_worker.server.tools import Tokenizer
from specdecode_worker.termination import write_termination_message

# Time from the end of the drain, or of the grace period, to the end of the process: 5 s are promised.
_EXIT_SECONDS = 4.5
# Part of that time to kill an engine that does not leave by itself.
_KILL_SECONDS = 1.0
# Time for which probes and clients still get the reason of an engine failure before the process exits.
_FAILED_SECONDS = 1
_LOOPBACK = "127.0.0.1"

log = logging.getLogger(__name__)


def _shutdown_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Install the handlers for SIGTERM and SIGINT on the running event loop, and return the events that they set.

    The first signal sets the first event (drain), each further one the second (do not wait).
    """
    drain_requested, exit_now = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: (exit_now if drain_requested.is_set() else drain_requested).set()
        )
    return drain_requested, exit_now


async def serve(
    config: WorkerConfig,
    standalone_plan: Plan | None = None,
    *,
    api_keys: Sequence[str] = (),
    build: Build | None = None,
) -> int:
    """Run the worker until it is asked to shut down, or the engine or another vital part of it dies.

    The process ends soon after the return of this function, even if a thread is busy.

    Args:
        config: Configuration of the worker.
        standalone_plan: Plan to start with when no usable plan is mounted.
        api_keys: API keys that are accepted in addition to those of the environment.
        build: Factory of the engine; tests of the server pass a fake engine.

    Returns:
        The exit code: 0 after a complete drain, 1 if requests were cut off or the engine died.

    Raises:
        CannotStart: A port is taken, or the credentials, the model, the capture folder or the synthetic knobs are
            unusable.
        UnusableFiles: A file of credentials or of the TLS certificate is unusable.
    """
    drain_requested, exit_now = _shutdown_signals()
    plan, knobs = _start_plan(config, standalone_plan), _start_knobs()
    credentials = load_credentials(config.server, os.environ, api_keys)
    tls = TlsCertificate.of_files(config.server.tls_cert_file, config.server.tls_key_file)
    sockets = _bind(config, admin_host=_LOOPBACK if credentials.generated_token else config.server.host)
    recorder = open_recorder(config, plan)
    engine, deadline, parts = EngineClient(config, plan, knobs, build=build), ExitDeadline(), VitalParts()
    try:
        lifecycle = Lifecycle()
        parts.start("engine watch", watch_engine(engine, lifecycle, config.server.step_timeout_seconds))
        service = Service(config, engine, lifecycle, plan, recorder)
        shutdown = GracefulShutdown(lifecycle, config.server, lambda: engine.unfinished_answers, exit_now)
        apps = (public_app(service, credentials.api_keys), admin_app(service, shutdown, credentials.admin_tokens))
        admin_port = sockets[1].getsockname()[1]
        with credentials.in_use(admin_port, os.environ):
            async with listening(apps, sockets, config, tls, parts):
                with contextlib.closing(service):
                    deadline.code = await _run(service, shutdown, drain_requested, parts.failed, deadline)
                deadline.set(_EXIT_SECONDS)
                return deadline.code
    finally:
        deadline.set(_EXIT_SECONDS)
        await parts.stop()
        await asyncio.gather(engine.close(deadline.left_seconds - _KILL_SECONDS), close_recorder(recorder))


async def _run(
    service: Service,
    shutdown: GracefulShutdown,
    drain_requested: asyncio.Event,
    failed: asyncio.Future[str],
    deadline: ExitDeadline,
) -> int:
    """Load the model and serve until the worker shuts down or fails. Return the exit code.

    Args:
        service: Service of the worker.
        shutdown: Shutdown, which a call of the admin port may begin too.
        drain_requested: Set by the first signal.
        failed: Resolves with the reason when a vital part fails.
        deadline: Deadline of the process, set when the shutdown or the failure begins.

    Raises:
        CannotStart: The tokenizer or the model cannot be loaded.
    """
    loading = asyncio.create_task(_load(service))
    drains = [asyncio.create_task(event.wait()) for event in (drain_requested, shutdown.begun)]
    ends: list[asyncio.Future[Any]] = [*drains, service.engine.ended, failed]
    await asyncio.wait([loading, *ends], return_when=asyncio.FIRST_COMPLETED)
    if loading.done() and loading.exception() is None:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    drain = any(task.done() for task in drains)
    for task in drains:
        task.cancel()
    if drain:
        loading.cancel()
        server = service.config.server
        deadline.set(server.endpoint_delay_seconds + server.grace_period_seconds + _EXIT_SECONDS)
        return await _shut_down(service, shutdown)
    if loading.done() and (error := loading.exception()) is not None:
        if isinstance(error, ServerError | ModelError):
            raise CannotStart(str(error)) from error
        raise error
    loading.cancel()
    return await _fail(service, failed.result() if failed.done() else service.engine.ended.result())


async def _load(service: Service) -> None:
    """Load the tokenizer in this process while the engine process loads the weights, then start to serve."""
    config = service.config
    tokenizer, defaults = await asyncio.to_thread(_texts, config)
    loaded = await asyncio.shield(service.engine.loaded)
    service.model_loaded(Model(tokenizer, loaded, defaults))
    service.prompts.start()
    if loaded.draft_problem:
        log.warning("serving plainly, the draft does not fit: %s", loaded.draft_problem)
    log.info("ready: %s, at most %d tokens", config.model.served_name, loaded.max_model_len)


def _texts(config: WorkerConfig) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of the model and the sampling defaults of its generation_config.json.

    Raises:
        ModelError: A file of the model is missing or invalid.
    """
    folder = model_store.resolve(config.model.target, Path(config.cache_dir))
    defaults = sampling_defaults(folder) if config.server.generation_config == "auto" else {}
    try:
        CompletionRequest.model_validate({"model": "", "prompt": "", **defaults})
    except ValidationError as error:
        (one, *_) = error.errors()
        raise ConfigMismatch(
            f"{folder}/generation_config.json: {one['loc'][0]}: {one['msg']}; --generation-config vllm ignores it"
        ) from None
    return Tokenizer.from_folder(folder, config.server.chat_template), defaults


async def _shut_down(service: Service, shutdown: GracefulShutdown) -> int:
    """Drain, end the streams that are left, and return the exit code."""
    log.info("leaving: %d requests are running", service.engine.in_flight)
    cut = await shutdown.begin()
    if cut:
        log.warning("%d requests were cut off", cut)
        service.engine.end_streams("this worker is shutting down")
    return 1 if cut or service.engine.ended.done() else 0


async def _fail(service: Service, reason: str) -> int:
    """Report the loss of the engine or of another vital part, and return exit code 1."""
    log.error("this worker has failed: %s", reason)
    service.lifecycle.fail(reason)
    service.engine.end_streams(reason)
    write_termination_message(reason)
    # Probes and clients get a response with the reason instead of a refused connection.
    await asyncio.sleep(_FAILED_SECONDS)
    return 1


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
    scheme = "http" if server.tls_cert_file is None else "https"
    sockets = []
    for what, host, port in (("public", server.host, server.port), ("admin", admin_host, server.admin_port)):
        try:
            sockets.append(listen(host, port, backlog=2048))
        except OSError as error:
            raise CannotStart(f"cannot listen on {host}:{port} ({what} port): {error.strerror or error}") from None
        log.info("%s port: %s://%s:%d", what, scheme, *sockets[-1].getsockname()[:2])
    return sockets
