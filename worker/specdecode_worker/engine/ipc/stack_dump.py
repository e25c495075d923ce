"""Stacks of the engine's threads, written by the engine at a signal, also while its Python code does not run."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path

STACK_SIGNAL = signal.SIGUSR2
"""Signal for a dump. SIGUSR1 has another meaning in an engine on several devices (`engine/parallel`)."""
WAIT_SECONDS = 2.0
"""Longest time to wait for the dump. A process that can still write one does so within milliseconds."""
_POLL_SECONDS = 0.05
_MAIN = "Current thread"


def install_stack_dump(path: Path) -> None:
    """Write the stacks of all threads to ``path`` at every STACK_SIGNAL to this process."""
    faulthandler.register(STACK_SIGNAL, file=path.open("w"), all_threads=True)


async def request_stacks(pid: int, path: Path) -> str:
    """Return the stacks of the threads of a process, that of the interrupted thread first.

    The answer says so if the process gives none, for example because it is stopped.
    """
    process_state = _process_state(pid)
    size = _size(path)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
    deadline, last = time.monotonic() + WAIT_SECONDS, size
    while time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
        now = _size(path)
        if now > size and now == last:
            return order_stacks(path.read_text(errors="replace")[size:])
        last = now
    return f"no stacks: the engine process gave none within {WAIT_SECONDS:g} s; its state is {process_state}"


def order_stacks(dump: str) -> str:
    """Move the thread that the signal interrupted, usually the main thread, to the start of a dump."""
    threads = dump.strip().split("\n\n")
    return "\n\n".join(sorted(threads, key=lambda text: not text.startswith(_MAIN)))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _process_state(pid: int) -> str:
    """Return the state of a process as the kernel names it, such as "T (stopped)" or "D (disk sleep)"."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return line.removeprefix("State:").strip()
    return "unknown"
