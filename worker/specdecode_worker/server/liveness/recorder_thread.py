"""Capture recorder of the server process: start, watch and end of its thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from specdecode_worker.capture import CaptureError, Recorder
from specdecode_worker.contract import CaptureConfig
from specdecode_worker.server.errors import CannotStart

_POLL_SECONDS = 0.25
_CLOSE_SECONDS = 2.0
"""Time for the thread to write what it holds. It runs while the engine ends."""


def open_recorder(config: CaptureConfig | None) -> Recorder | None:
    """Open the capture recorder; None without capture configuration.

    Raises:
        CannotStart: The recorder cannot be opened. Serving without it would hide that no traffic is captured.
    """
    if config is None:
        return None
    try:
        return Recorder(config)
    except CaptureError as error:
        raise CannotStart(f"capture: {error}") from None


async def watch_recorder(recorder: Recorder) -> None:
    """Wait until the thread of the recorder fails. Raises RuntimeError with its reason."""
    while not recorder.failure:
        await asyncio.sleep(_POLL_SECONDS)
    raise RuntimeError(recorder.failure)


async def close_recorder(recorder: Recorder | None) -> None:
    """Close the recorder in a thread of its own: those of the event loop may all be busy."""
    if recorder is None:
        return
    executor = ThreadPoolExecutor(1)
    await asyncio.get_running_loop().run_in_executor(executor, recorder.close, _CLOSE_SECONDS)
    executor.shutdown(wait=False)
