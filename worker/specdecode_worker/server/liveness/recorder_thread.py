"""Capture recorder of the server process: start, watch and end of its thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from specdecode_worker.capture import CaptureError, Recorder
from specdecode_worker.capture.live import LiveRecorder
from specdecode_worker.contract import Env, Plan, WorkerConfig
from specdecode_worker.server.access.scopes import Scope
from specdecode_worker.server.errors import CannotStart

_POLL_SECONDS = 0.25
_CLOSE_SECONDS = 2.0
"""Time for the thread to write what it holds. It runs while the engine ends."""

log = logging.getLogger(__name__)


def open_recorder(config: WorkerConfig, plan: Plan) -> Recorder | LiveRecorder | None:
    """Open the capture recorder: that of the configuration, else the one that follows the plan.

    Returns None without a folder for either.

    Raises:
        CannotStart: The recorder of the configuration cannot be opened. Serving without it would hide that no traffic
            is captured. A recorder that follows the plan reports its problem instead.
    """
    read_token = _operator_token(config.server.admin_tokens_path)
    if config.capture is not None:
        try:
            return Recorder(config.capture, read_token=read_token)
        except CaptureError as error:
            raise CannotStart(f"capture: {error}") from None
    if config.capture_dir is not None:
        return LiveRecorder(Path(config.capture_dir), plan.capture, read_token=read_token)
    if plan.capture is not None:
        log.warning("the plan switches capture on, but this worker has no folder for it (capture_dir)")
    return None


def _operator_token(folder: str | None) -> Callable[[], str | None]:
    """Return the reader of the current admin token with the scope operator; it returns None without one."""
    given = os.environ.get(Env.admin_token, "").strip() or None

    def read() -> str | None:
        if folder is not None:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                lines = (Path(folder) / Scope.operator).read_text().split()
                if lines:
                    return lines[0]
        return given

    return read


async def watch_recorder(recorder: Recorder) -> None:
    """Wait until the thread of the recorder fails. Raises RuntimeError with its reason."""
    while not recorder.failure:
        await asyncio.sleep(_POLL_SECONDS)
    raise RuntimeError(recorder.failure)


async def close_recorder(recorder: Recorder | LiveRecorder | None) -> None:
    """Close the recorder in a thread of its own: those of the event loop may all be busy."""
    if recorder is None:
        return
    executor = ThreadPoolExecutor(1)
    await asyncio.get_running_loop().run_in_executor(executor, recorder.close, _CLOSE_SECONDS)
    executor.shutdown(wait=False)
