"""Recorder of a worker whose configuration has a capture folder, and the thread that writes its records.

The server hands records over without waiting; records that exceed the queue are dropped.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from specdecode_worker.capture.counters import CaptureCounts, Dropped
from specdecode_worker.capture.record import Record
from specdecode_worker.capture.record_queue import QueuedRecord, RecordQueue
from specdecode_worker.capture.redaction import Hook, load_hook, redact_and_encode
from specdecode_worker.capture.retention import Retention
from specdecode_worker.capture.segments import SegmentWriter
from specdecode_worker.capture.subject_keys import SubjectKeys, UserHashes
from specdecode_worker.capture.user_deletion import DeletionCounts, delete_hashed_records
from specdecode_worker.contract import CaptureConfig
from specdecode_worker.contract.capture import Consent

log = logging.getLogger(__name__)


class Recorder:
    """Recorder of one worker.

    ``share_of``, ``should_capture`` and ``enqueue`` must be called from the event loop. The recorder's own thread
    redacts and writes. ``delete_user`` blocks.
    """

    consent: Consent = "OptOut"
    is_on = True
    epoch = 0

    def __init__(
        self,
        config: CaptureConfig,
        *,
        read_token: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.time,
        seed: int | None = None,
    ) -> None:
        """Start the thread.

        Raises:
            CaptureError: the redaction hook or the folder cannot be used.
        """
        self.counts = CaptureCounts()
        self.failure = ""
        """Reason why the thread ended before ``close``; empty while it works."""
        self.folder = Path(config.dir)
        self.retention = Retention(config.max_age_seconds, config.max_bytes)
        self._config = config
        self._random = random.Random(seed)
        self._hook: Hook | None = load_hook(config.redact) if config.redact else None
        self._segments = SegmentWriter(
            self.folder, max_bytes=config.max_bytes, max_age_seconds=config.max_age_seconds, clock=clock
        )
        self._subjects = SubjectKeys(self.folder, read_token)
        self._queue = RecordQueue()
        self._writing = threading.Lock()
        self._closing = False
        self._failing = False
        self._thread = threading.Thread(target=self._run_or_fail, name="capture", daemon=True)
        self._thread.start()

    def share_of(self, task: str) -> float:
        """Return the share of requests of ``task`` to capture."""
        return self._config.task_shares.get(task, self._config.share)

    def should_capture(self, task: str) -> bool:
        """Return whether to capture this request of ``task``, by a random draw with its share."""
        return self._random.random() < self.share_of(task)

    def subject_of(self, user: str | None) -> str:
        """Return the hash of a request's user; empty without one."""
        return self._subjects.hash_of(user)

    def enqueue(self, record: Record, epoch: int = 0) -> None:
        """Queue a record without waiting; drop it if the queue is full."""
        if not self._queue.put(QueuedRecord(record, epoch)):
            self.counts.drop(Dropped.queue_full)

    def user_hashes(self, user: str) -> UserHashes:
        """Return the hashes that records of a user may have. Reads the folder."""
        return UserHashes(user, self._subjects.known().values())

    def delete_user(self, user: str) -> DeletionCounts:
        """Delete the records of a user from the folder and from the queue.

        Raises:
            FolderUnusable: The folder cannot be read, or a segment cannot be replaced.
        """
        hashes = self.user_hashes(user)
        # A record that is being written is either on disk before the folder is read, or marked and not written.
        with self._writing:
            queued = self._queue.discard(lambda item: hashes.matches(item.record.user))
        self.counts.drop(Dropped.deleted, queued)
        counts = delete_hashed_records(self.folder, hashes)
        counts.queued = queued
        return counts

    def close(self, seconds: float = 5.0) -> None:
        """Write the queued records and stop the thread, waiting at most ``seconds``."""
        self._closing = True
        self._queue.wake()
        self._thread.join(seconds)

    def _run_or_fail(self) -> None:
        try:
            self._run()
        except BaseException as error:  # a redaction hook may even raise SystemExit
            self.failure = f"{type(error).__name__}: {error}"
            raise

    def _run(self) -> None:
        swept = 0.0
        every = self._segments.sweep_seconds
        while True:
            if time.monotonic() >= swept + every:
                self._sweep()
                swept = time.monotonic()
            item = self._queue.take(every, lambda: not self._closing or len(self._queue) > 0)
            if item is not None:
                self._try_to_write(item)
                self._queue.done(item)
            elif self._closing:
                break
        self._segments.close()

    def _try_to_write(self, item: QueuedRecord) -> None:
        """Write a record or count it as dropped. No error may end the thread, which writes again when it can."""
        try:
            self._write(item)
        except Exception as error:
            self.counts.drop(Dropped.write_error)
            if not self._failing:  # log once only: a full disk would also fill the log
                log.warning("captured records cannot be written: %s", error, exc_info=not isinstance(error, OSError))
            self._failing = True

    def _write(self, item: QueuedRecord) -> None:
        encoded = redact_and_encode(item.record, self._hook)
        if isinstance(encoded, Dropped):
            self.counts.drop(encoded)
            return
        record, body = encoded
        if len(body) > self._segments.largest:
            self.counts.drop(Dropped.too_large)
            return
        with self._writing:
            if item.unwanted:
                return
            self._subjects.store_for(record.user)
            self._segments.append(body)
        self.counts.records[record.task] += 1
        if self._failing:
            dropped = self.counts.dropped[Dropped.write_error]
            log.warning("captured records are written again; %d were dropped since the start", dropped)
        self._failing = False

    def _sweep(self) -> None:
        try:
            self._subjects.refresh()
            self.counts.stored_bytes = self._segments.sweep()
            self._subjects.expire(self._config.max_age_seconds)
        except Exception as error:
            log.warning("captured records cannot be swept: %s", error)
