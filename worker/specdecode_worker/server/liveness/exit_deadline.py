"""Deadline for the end of the server process, which busy threads would otherwise delay.

The interpreter waits for the threads of its executors before it exits. A thread that tokenizes a long text, or an
engine process that waits for its device in the kernel, can take minutes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time


class ExitDeadline:
    """Deadline after which the process ends with ``code``, whatever its threads do. It is not set at first."""

    def __init__(self) -> None:
        self.code = 1
        self._deadline_seconds = float("inf")
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._wait, name="exit deadline", daemon=True)

    def set(self, seconds: float) -> None:
        """End the process ``seconds`` from now. An earlier deadline stays in force."""
        with self._changed:
            self._deadline_seconds = min(self._deadline_seconds, time.monotonic() + seconds)
            self._changed.notify()
        if not self._thread.is_alive():
            self._thread.start()

    @property
    def left_seconds(self) -> float:
        """Time until the deadline."""
        return self._deadline_seconds - time.monotonic()

    def _wait(self) -> None:
        with self._changed:
            while (left := self.left_seconds) > 0:
                self._changed.wait(left)
        with contextlib.suppress(OSError, ValueError):
            print("the process ends at its deadline; a thread was still busy", file=sys.stderr, flush=True)
        os._exit(self.code)
