"""Thread that redacts records and hands them to the store. It can be abandoned when a redaction hook hangs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from specdecode_worker.capture.counters import CaptureCounts, Dropped
from specdecode_worker.capture.errors import CaptureError
from specdecode_worker.capture.record import Record
from specdecode_worker.capture.record_queue import QueuedRecord, RecordQueue
from specdecode_worker.capture.redaction import Hook, load_hook, redact_and_encode

_TAKE_SECONDS = 1.0

Store = Callable[["RecordWriter", QueuedRecord, tuple[Record, bytes] | Dropped], bool]
"""Stores a redacted record with its encoding, or counts it as dropped. Returns False if another writer must redact it.

Raises OSError if the disk refuses it.
"""


class RecordWriter:
    """Writer of one redaction hook; None writes records as they are.

    ``failure`` is the reason why the thread ended by itself. It never has text of a record.
    """

    def __init__(
        self, redact: str | None, queue: RecordQueue, counts: CaptureCounts, store: Store, ended: Callable[[], None]
    ) -> None:
        self.redact = redact
        self.failure = ""
        self.disk_failed = False
        """True if the thread ended because the disk refused a record."""
        self.is_ready = False
        """True once the hook is loaded."""
        self.stopped = False
        """True once the writer takes no further record. What it holds is given back to the queue."""
        self.closing = False
        """True once the writer ends when the queue is empty."""
        self._queue, self._counts, self._store, self._ended = queue, counts, store, ended
        self._activity: tuple[str, float] | None = None
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def activity(self) -> tuple[str, float] | None:
        """Return "redaction" or "disk" with the seconds since it began; None while the writer waits for records."""
        activity = self._activity
        return None if activity is None else (activity[0], time.monotonic() - activity[1])

    def stop(self) -> None:
        """Let the thread end, without waiting for it."""
        self.stopped = True
        self._queue.wake()

    def finish(self, seconds: float) -> None:
        """Write the queued records and end the thread, waiting at most ``seconds``."""
        self.closing = True
        self._queue.wake()
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            with self._doing("redaction"):
                hook = load_hook(self.redact) if self.redact else None
            self.is_ready = True
            self._ended()  # the problem of an earlier writer may be over
            self._write_all(hook)
        except OSError as error:
            self.disk_failed = True
            self.failure = f"captured records cannot be written: {os.strerror(error.errno) if error.errno else error}"
        except CaptureError as error:
            self.failure = str(error)
        except BaseException as error:  # a hook may even raise SystemExit; its message may have text of a request
            self.failure = f"the capture thread ended with {type(error).__name__}"
        finally:
            self._ended()

    def _write_all(self, hook: Hook | None) -> None:
        while not self.stopped:
            item = self._queue.take(_TAKE_SECONDS, self._may_take)
            if item is None:
                if self.closing:
                    return
                continue
            try:
                if not self._write(item, hook):
                    self.stopped = True
                    self._queue.give_back(item)
            except OSError:
                self._counts.drop(Dropped.write_error)
                raise
            except BaseException:
                self._counts.drop(Dropped.redaction_error)
                raise
            finally:
                self._queue.done(item)

    def _may_take(self) -> bool:
        return not self.stopped and not (self.closing and not len(self._queue))

    def _write(self, item: QueuedRecord, hook: Hook | None) -> bool:
        """Write or drop a record. Return False if another writer must do it."""
        with self._doing("redaction"):
            encoded = redact_and_encode(item.record, hook)
        if self.stopped:
            return False
        with self._doing("disk"):
            return self._store(self, item, encoded)

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        self._activity = (what, time.monotonic())
        try:
            yield
        finally:
            self._activity = None
