"""Clock of a run over all its restarts, stored in the run's folder every few seconds."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from specdecode_worker.training.artifacts.atomic_files import write_text

SAVE_SECONDS = 5.0
"""Interval of saves: the most that a kill without warning takes off the run's time."""


class RunClock:
    """Time of a run in seconds, of this process and of those before it.

    ``limit_seconds`` is the longest time of the run; None for no limit.
    """

    def __init__(
        self, path: Path, limit_seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._limit, self._clock = path, limit_seconds, clock
        self._earlier, self._started = _stored_seconds(path), clock()

    @property
    def seconds(self) -> float:
        """Time of the run so far."""
        return self._earlier + self._clock() - self._started

    @property
    def is_over(self) -> bool:
        """True when the limit is reached."""
        return self._limit is not None and self.seconds >= self._limit

    def save(self) -> None:
        """Store the time. A disk that refuses it ends no run: its own writes fail too and say why."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json.dumps({"seconds": round(self.seconds, 3)}) + "\n")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Save the time every SAVE_SECONDS while the block runs, and at its end."""
        stop = threading.Event()

        def save_often() -> None:
            while not stop.wait(SAVE_SECONDS):
                self.save()

        thread = threading.Thread(target=save_often, name="run-clock", daemon=True)
        self.save()
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.save()


def _stored_seconds(path: Path) -> float:
    """Return the time that earlier processes stored, 0 without a readable file."""
    try:
        return max(0.0, float(json.loads(path.read_bytes())["seconds"]))
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
