"""Capture recorder of the server process: its start and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from specdecode_worker.capture import CaptureError, Recorder
from specdecode_worker.capture.redaction import load_hook
from specdecode_worker.capture.segments import SegmentWriter
from specdecode_worker.contract import CaptureConfig, CaptureRules, Env, Plan, WorkerConfig
from specdecode_worker.server.access.scopes import Scope
from specdecode_worker.server.errors import CannotStart

_CLOSE_SECONDS = 2.0
"""Time for the thread to write what it holds. It runs while the engine ends."""

log = logging.getLogger(__name__)


def open_recorder(config: WorkerConfig, plan: Plan) -> Recorder | None:
    """Open the capture recorder with the rules of the configuration, else with those of the plan.

    Returns None without a folder for either.

    Raises:
        CannotStart: The folder or the hook of the configuration cannot be used. Problems of the plan's rules, and all
            that arise later, are in the worker's report.
    """
    read_token = _operator_token(config.server.admin_tokens_path)
    if config.capture is not None:
        try:
            return _configured(config.capture, read_token)
        except CaptureError as error:
            raise CannotStart(f"capture: {error}") from None
    if config.capture_dir is not None:
        return Recorder(Path(config.capture_dir), plan.capture, read_token=read_token)
    if plan.capture is not None:
        log.warning("the plan switches capture on, but this worker has no folder for it (capture_dir)")
    return None


def _configured(config: CaptureConfig, read_token: Callable[[], str | None]) -> Recorder:
    """Open the recorder of the configuration. Raise CaptureError if its folder or its hook cannot be used."""
    folder = Path(config.dir)
    if config.redact is not None:
        load_hook(config.redact)
    SegmentWriter(folder, max_bytes=config.max_bytes, max_age_seconds=config.max_age_seconds)
    return Recorder(folder, CaptureRules(**config.model_dump(exclude={"dir"})), read_token=read_token)


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


async def close_recorder(recorder: Recorder | None) -> None:
    """Close the recorder in a thread of its own: those of the event loop may all be busy."""
    if recorder is None:
        return
    executor = ThreadPoolExecutor(1)
    await asyncio.get_running_loop().run_in_executor(executor, recorder.close, _CLOSE_SECONDS)
    executor.shutdown(wait=False)
