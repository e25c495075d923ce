"""Bounded queue between the event loop and the thread that writes records. Waiting records can be discarded."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from specdecode_worker.capture.record import Record

QUEUE_RECORDS = 256


@dataclass(slots=True, eq=False)
class QueuedRecord:
    """Record that waits to be written. ``epoch`` is that of the recorder when the request began."""

    record: Record
    epoch: int = 0
    unwanted: bool = False
    """True if it was discarded after it had been taken. It must not be written."""


class RecordQueue:
    """Queue of records. No method waits for a thread that redacts or writes."""

    def __init__(self, size: int = QUEUE_RECORDS) -> None:
        self._size = size
        self._waiting: deque[QueuedRecord] = deque()
        self._taken: set[QueuedRecord] = set()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: QueuedRecord) -> bool:
        """Queue a record. Return False if the queue is full."""
        with self._changed:
            if len(self._waiting) >= self._size:
                return False
            self._waiting.append(item)
            self._changed.notify()
            return True

    def take(self, timeout: float, may_take: Callable[[], bool] = lambda: True) -> QueuedRecord | None:
        """Return the oldest record, or None after ``timeout`` seconds, or once ``may_take`` is false.

        The caller hands the record to `done` when it is written or dropped, or to `give_back`.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while may_take():
                if self._waiting:
                    item = self._waiting.popleft()
                    self._taken.add(item)
                    return item
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None
            return None

    def done(self, item: QueuedRecord) -> None:
        """Forget a record that was taken."""
        with self._changed:
            self._taken.discard(item)

    def give_back(self, item: QueuedRecord) -> None:
        """Let another thread take a record that was taken, unless it was discarded meanwhile."""
        with self._changed:
            self._taken.discard(item)
            if not item.unwanted:
                self._waiting.appendleft(item)
                self._changed.notify()

    def discard(self, is_unwanted: Callable[[QueuedRecord], bool]) -> int:
        """Remove the records for which ``is_unwanted`` holds, mark those that are being written, and count both."""
        with self._changed:
            discarded = [item for item in (*self._waiting, *self._taken) if not item.unwanted and is_unwanted(item)]
            for item in discarded:
                item.unwanted = True
            self._waiting = deque(item for item in self._waiting if not item.unwanted)
        return len(discarded)

    def wake(self) -> None:
        """Let every call of `take` check its condition again."""
        with self._changed:
            self._changed.notify_all()
