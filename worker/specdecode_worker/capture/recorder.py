"""Background thread that writes records.

The server hands records over without waiting; records that exceed the queue are dropped.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from specdecode_worker.capture.counters import CaptureCounts, Dropped
from specdecode_worker.capture.record import Record, encode
from specdecode_worker.capture.redaction import Hook, apply_hook, load_hook
from specdecode_worker.capture.segments import SegmentWriter
from specdecode_worker.contract import CaptureConfig

QUEUE_RECORDS = 256

log = logging.getLogger(__name__)


class Recorder:
    """Recorder of one worker.

    ``share_of``, ``should_capture`` and ``enqueue`` must be called from the event loop. The recorder's own thread
    redacts and writes.
    """

    def __init__(
        self, config: CaptureConfig, *, clock: Callable[[], float] = time.time, seed: int | None = None
    ) -> None:
        """Start the thread.

        Raises:
            CaptureError: the redaction hook or the folder cannot be used.
        """
        self.counts = CaptureCounts()
        self.failure = ""
        """Reason why the thread ended before ``close``; empty while it works."""
        self._config = config
        self._random = random.Random(seed)
        self._hook: Hook | None = load_hook(config.redact) if config.redact else None
        self._segments = SegmentWriter(
            Path(config.dir), max_bytes=config.max_bytes, max_age_seconds=config.max_age_seconds, clock=clock
        )
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE_RECORDS)
        self._failing = False
        self._thread = threading.Thread(target=self._run_or_fail, name="capture", daemon=True)
        self._thread.start()

    def share_of(self, task: str) -> float:
        """Return the share of requests of ``task`` to capture."""
        return self._config.task_shares.get(task, self._config.share)

    def should_capture(self, task: str) -> bool:
        """Return whether to capture this request of ``task``, by a random draw with its share."""
        return self._random.random() < self.share_of(task)

    def enqueue(self, record: Record) -> None:
        """Queue a record without waiting; drop it if the queue is full."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.counts.dropped[Dropped.queue_full] += 1

    def close(self, seconds: float = 5.0) -> None:
        """Write the queued records and stop the thread, waiting at most ``seconds``."""
        deadline = time.monotonic() + seconds
        try:
            self._queue.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(max(deadline - time.monotonic(), 0))

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
            try:
                record = self._queue.get(timeout=every)
            except queue.Empty:
                continue
            if record is None:
                break
            self._try_to_write(record)
        self._segments.close()

    def _try_to_write(self, record: Record) -> None:
        """Write a record or count it as dropped. No error may end the thread, which writes again when it can."""
        try:
            self._write(record)
        except Exception as error:
            self.counts.dropped[Dropped.write_error] += 1
            if not self._failing:  # log once only: a full disk would also fill the log
                log.warning("captured records cannot be written: %s", error, exc_info=not isinstance(error, OSError))
            self._failing = True

    def _write(self, record: Record) -> None:
        redacted = apply_hook(record, self._hook)
        if isinstance(redacted, Dropped):
            self.counts.dropped[redacted] += 1
            return
        try:
            body = encode(redacted)
        except (TypeError, ValueError):  # the hook set a field to a type that a record cannot hold
            self.counts.dropped[Dropped.redaction_error] += 1
            return
        if len(body) > self._segments.largest:
            self.counts.dropped[Dropped.too_large] += 1
            return
        self._segments.append(body)
        self.counts.records[redacted.task] += 1
        if self._failing:
            dropped = self.counts.dropped[Dropped.write_error]
            log.warning("captured records are written again; %d were dropped since the start", dropped)
        self._failing = False

    def _sweep(self) -> None:
        try:
            self.counts.stored_bytes = self._segments.sweep()
        except Exception as error:
            log.warning("captured records cannot be swept: %s", error)
