"""Watch over the engine process: probes fail while it makes no progress, and a hung engine is killed."""

from __future__ import annotations

import asyncio
import logging
import time

from specdecode_worker.engine.ipc.engine_client import EngineClient
from specdecode_worker.engine.ipc.engine_watchdog import EngineWatchdog, State
from specdecode_worker.server.lifecycle import Lifecycle
from specdecode_worker.termination import write_termination_message

_POLL_SECONDS = 0.1

log = logging.getLogger(__name__)


async def watch_engine(engine: EngineClient, lifecycle: Lifecycle, step_timeout_seconds: float) -> None:
    """Watch the engine until it ends. A suspect engine makes the worker unready; a hung engine is killed."""
    watchdog = EngineWatchdog(step_timeout_seconds)
    while not engine.ended.done():
        assessment = watchdog.observe(engine.heartbeat, time.monotonic())
        if assessment.state is State.HUNG:
            await _end_hung_engine(engine, lifecycle, f"the engine hangs: {assessment}")
            return
        suspicion = str(assessment) if assessment.state is State.SUSPECT else ""
        if bool(suspicion) != bool(lifecycle.suspicion):
            log.warning(
                "not ready, the engine makes %s" if suspicion else "the engine makes progress again%s", suspicion
            )
        lifecycle.suspicion = suspicion
        await asyncio.sleep(_POLL_SECONDS)


async def _end_hung_engine(engine: EngineClient, lifecycle: Lifecycle, reason: str) -> None:
    """Fail the probes, write the facts and the engine's stacks, and kill the engine, which ends every stream.

    The stacks go to the log and the termination message only, because clients must not see them.
    """
    lifecycle.fail(reason)
    log.error("%s", reason)
    stacks = await engine.stacks()
    log.error("%s", stacks)
    write_termination_message(f"{reason}\n{stacks}")
    engine.kill(reason)
