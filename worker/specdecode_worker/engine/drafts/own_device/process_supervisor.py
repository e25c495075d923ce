"""Supervisor of a draft process: a lost process costs the proposals of one step, and is started again with back-off.

The engine thread sends messages. A thread restarts a lost process; the engine thread takes the new one over between
two steps, because the keys of all requests are gone with the old one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from specdecode_worker.engine.drafts.own_device.draft_messages import Prefill, Propose
from specdecode_worker.engine.drafts.own_device.draft_process import DraftLost, DraftProcess
from specdecode_worker.models.errors import ModelError

FIRST_DELAY_SECONDS = 1.0
"""Time from the loss of a process to the start of the next one."""
LONGEST_DELAY_SECONDS = 60.0
"""Bound of that time, which doubles with every loss. A process that lived for longer resets it."""

log = logging.getLogger(__name__)


class ProcessSupervisor:
    """Owner of the process of one draft. All methods but ``close`` are for the engine thread."""

    def __init__(
        self, process: DraftProcess, start: Callable[[], DraftProcess], first_delay: float = FIRST_DELAY_SECONDS
    ) -> None:
        """Take over a process that is ready.

        Args:
            process: The process.
            start: Function that starts another one, which begins to load.
            first_delay: Time from the first loss to the restart, in seconds.
        """
        self._process: DraftProcess | None = process
        self._start, self._delay, self._first_delay = start, first_delay, first_delay
        self._restarted: DraftProcess | None = None
        self._starting: DraftProcess | None = None
        self._closing, self._lock = threading.Event(), threading.Lock()
        self.problem = ""
        """Reason why no process can be used now; empty if one can."""

    @property
    def pid(self) -> int | None:
        """Process id of the process in use; None without one."""
        return None if self._process is None else self._process.pid

    @property
    def usable(self) -> bool:
        """True if a process can be asked."""
        return self._process is not None

    def send(self, message: Prefill | Propose, tensors: Sequence[Tensor]) -> None:
        """Send a message without waiting for its answer. It is dropped if there is no process."""
        if self._process is not None:
            try:
                self._process.send(message, tensors)
            except DraftLost as error:
                self._lose(self._process, str(error))

    def ask(self, message: Propose, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send a message and return the tensors of its answer; none if there is no process or if it is lost."""
        self.send(message, tensors)
        if self._process is not None:
            try:
                return self._process.receive()
            except DraftLost as error:
                self._lose(self._process, str(error))
        return []

    def take_restarted(self) -> bool:
        """Begin to use a restarted process, if there is one, and return whether there was. Its cache is empty."""
        with self._lock:
            process, self._restarted = self._restarted, None
        if process is None:
            return False
        self._process, self.problem = process, ""
        log.info("the draft process is back, with process id %d", process.pid)
        return True

    def close(self) -> None:
        """End the process and do not start another one. May be called twice, from any thread."""
        self._closing.set()
        with self._lock:
            for process in (self._process, self._restarted, self._starting):
                if process is not None:
                    process.kill()

    def _lose(self, process: DraftProcess, reason: str) -> None:
        process.kill()
        self._process = None
        if time.monotonic() - process.started_seconds > LONGEST_DELAY_SECONDS:
            self._delay = self._first_delay
        self._report(f"the draft process {reason}")
        threading.Thread(target=self._restart, name="draft-restart", daemon=True).start()

    def _report(self, problem: str) -> None:
        self.problem = f"{problem}; requests decode plainly, and it starts again in {self._delay:g} seconds"
        log.warning("%s", self.problem)

    def _restart(self) -> None:
        """Start processes, in a thread, until one is ready."""
        while not self._closing.wait(self._delay):
            self._delay = min(2 * self._delay, LONGEST_DELAY_SECONDS)
            try:
                process = self._begin()
                if process is not None:
                    process.wait_ready()
            except (ModelError, OSError) as error:
                self._give_up(str(error))
                continue
            with self._lock:
                self._restarted, self._starting = process, None
            return

    def _begin(self) -> DraftProcess | None:
        """Start a process, which `close` then ends; None after that."""
        with self._lock:
            self._starting = None if self._closing.is_set() else self._start()
            return self._starting

    def _give_up(self, reason: str) -> None:
        """End the process that could not be started."""
        with self._lock:
            process, self._starting = self._starting, None
        if process is not None:
            process.kill()
        if not self._closing.is_set():
            self._report(reason)
