"""Recorder of a worker, which follows rules that the plan may change while it serves, and what it sends of its folder.

No change needs a restart, and none of it delays a request.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import random
import re
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from specdecode_worker.capture.live import CaptureLimits, LiveStore, RecordWriter, RulesState
from specdecode_worker.capture.records import (
    CaptureCounts,
    CaptureError,
    Dropped,
    FolderUnusable,
    QueuedRecord,
    Record,
    RecordQueue,
    SegmentNotFound,
)
from specdecode_worker.capture.segments import (
    MAX_LISTED,
    MAX_SEGMENT_BYTES,
    SEGMENT_NAME,
    DeletionCounts,
    ListedSegment,
    Retention,
    SegmentListing,
    SubjectKeys,
    UserHashes,
    list_segments,
)
from specdecode_worker.contract.capture import CaptureReport, CaptureRules, Consent

log = logging.getLogger(__name__)

MAX_HUNG_WRITERS = 4
"""Most threads that may hang in redaction hooks. No further one is started."""
_MAX_PROBLEM = 1000
_CLOCK_SECONDS = 60.0
"""Time by which ``delete_before`` may be in the future before the report says so."""


class Recorder:
    """Recorder of one worker, with a thread that brings folder and writer in line with the rules.

    ``user_hashes``, ``delete_user``, ``close_segment`` and ``close`` block. All else may be called from the event loop.
    No failure of capture leaves this class.
    """

    def __init__(
        self,
        folder: Path,
        rules: CaptureRules | None,
        *,
        read_token: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.time,
        seed: int | None = None,
        limits: CaptureLimits = CaptureLimits(),  # noqa: B008  # frozen
    ) -> None:
        """Start the control thread, which deletes what the folder holds if ``rules`` is None."""
        self.folder = folder
        self.counts = CaptureCounts()
        self.is_stopped = False
        """True while a problem stops capture. No record is queued then."""
        self._state = RulesState(rules, epoch=0 if rules is not None else 1)
        """Rules in force, replaced as a whole by the event loop."""
        self._clock, self._limits = clock, limits
        self._random = random.Random(seed)
        self._subjects = SubjectKeys(folder, read_token)
        self._queue = RecordQueue()
        self._store = LiveStore(folder, self.counts, clock)
        self._cleared_epoch = 0
        self._applied: CaptureRules | None = None
        self._tried: CaptureRules | None = None
        self._writer: RecordWriter | None = None
        self._stopped_writers: list[RecordWriter] = []
        self._problem = ""
        self._until_written = False
        self._retry_at = self._swept_at = 0.0
        self._busy_since: float | None = None
        self._closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._follow_rules, name="capture control", daemon=True)
        self._thread.start()

    @property
    def is_on(self) -> bool:
        """True if the plan switches capture on."""
        return self._state.rules is not None

    @property
    def consent(self) -> Consent:
        """Consent that requests need."""
        rules = self._state.rules
        return rules.consent if rules else "OptOut"

    @property
    def epoch(self) -> int:
        """Number of times that capture was switched off."""
        return self._state.epoch

    @property
    def retention(self) -> Retention | None:
        """Bounds of the folder; None while capture is off."""
        rules = self._state.rules
        return Retention(rules.max_age_seconds, rules.max_bytes) if rules else None

    def apply(self, rules: CaptureRules | None) -> None:
        """Follow ``rules`` from the next request on; None switches capture off and deletes what is stored.

        Only the event loop may call it.
        """
        state = self._state
        if rules != state.rules:
            self._state = RulesState(rules, state.epoch + (rules is None))
            self._wake.set()

    def share_of(self, task: str) -> float:
        """Return the share of requests of ``task`` to capture."""
        rules = self._state.rules
        return rules.task_shares.get(task, rules.share) if rules else 0.0

    def should_capture(self, task: str) -> bool:
        """Return whether to capture this request of ``task``, by a random draw with its share."""
        if self._random.random() >= self.share_of(task):
            return False
        if self.is_stopped:
            self.counts.drop(Dropped.stopped)
            return False
        return True

    def subject_of(self, user: str | None) -> str:
        """Return the hash of a request's user; empty without one."""
        return self._subjects.hash_of(user)

    def enqueue(self, record: Record, epoch: int) -> None:
        """Queue the record of a request that began in ``epoch``; drop it if the queue is full or rules forbid it."""
        if self.is_stopped:
            self.counts.drop(Dropped.stopped)
        elif self._state.forbids(record, epoch):
            self.counts.drop(Dropped.deleted)
        elif not self._queue.put(QueuedRecord(record, epoch)):
            self.counts.drop(Dropped.queue_full)

    @property
    def problem(self) -> str:
        """Reason why requests are not captured; empty if there is none."""
        if self._problem:
            return self._problem
        writer, busy_since = self._writer, self._busy_since
        activity, seconds = (writer.activity() if writer else None) or ("", 0.0)
        if activity == "disk" and seconds > self._limits.hang:
            return f"{self.folder} has not answered for {seconds:.0f} s"
        if busy_since is not None and (seconds := time.monotonic() - busy_since) > self._limits.hang:
            return f"{self.folder} has been read and cleared for {seconds:.0f} s"
        return ""

    def report(self) -> CaptureReport:
        """Return the state for the worker's report."""
        totals = self._store.totals
        return CaptureReport(
            conversations=totals.records,
            stored_bytes=self.counts.stored_bytes,
            oldest=totals.oldest,
            dropped={reason.value: count for reason in Dropped if (count := self.counts.dropped[reason])},
            problem=(self.problem or self._clock_problem())[:_MAX_PROBLEM] or None,
        )

    def user_hashes(self, user: str) -> UserHashes:
        """Return the hashes that records of a user may have. Reads the folder."""
        return UserHashes(user, self._subjects.known().values())

    def delete_user(self, user: str) -> DeletionCounts:
        """Delete the records of a user from the folder and from the queue.

        Raises:
            FolderUnusable: The disk does not answer, or a segment cannot be read or deleted.
        """
        hashes = self.user_hashes(user)
        if not self._store.lock.acquire(timeout=self._limits.hang):
            raise FolderUnusable(f"{self.folder} does not answer; records of the user may still be there")
        try:
            queued = self._queue.discard(lambda item: hashes.matches(item.record.user))
            self.counts.drop(Dropped.deleted, queued)
            counts = self._store.delete_user(hashes)
        except OSError as error:
            raise FolderUnusable(f"{self.folder}: {error.strerror or error}") from None
        finally:
            self._store.lock.release()
        counts.queued = queued
        return counts

    def close_segment(self) -> None:
        """Close the open segment, unless the disk does not answer, so that all records can be listed. Blocks."""
        if self._store.lock.acquire(timeout=self._limits.hang):
            self._store.close_segment()
            self._store.lock.release()

    def is_closed(self, name: str) -> bool:
        """Return whether the segment ``name`` of the folder is not open."""
        return self._store.is_closed(name)

    def close(self, seconds: float = 5.0) -> None:
        """Write the queued records and stop the threads, waiting at most ``seconds``."""
        end = time.monotonic() + seconds
        self._closing = True
        self._wake.set()
        self._thread.join(seconds)
        if self._writer is not None:
            self._writer.finish(max(end - time.monotonic(), 0))
        if self._store.lock.acquire(timeout=max(end - time.monotonic(), 0)):
            self._store.close()
            self._store.lock.release()

    def _clock_problem(self) -> str:
        """Return the problem of a ``delete_before`` that lies in this worker's future."""
        rules = self._state.rules
        ahead = rules.delete_before - self._clock() if rules else 0.0
        if ahead <= _CLOCK_SECONDS:
            return ""
        return f"delete_before is {ahead:.0f} s ahead of this worker's clock; nothing is captured until then"

    # Methods of the control thread. No failure of capture ends it.

    def _follow_rules(self) -> None:
        while True:
            self._wake.clear()
            if self._closing:
                return
            self._busy_since = time.monotonic()
            try:
                self._converge()
            except Exception as error:
                if not isinstance(error, OSError | CaptureError):
                    log.exception("capture control")
                self._fail(f"{self.folder}: {getattr(error, 'strerror', None) or error}")
            self._busy_since = None
            state = self._state
            is_idle = state.rules is None and state.epoch == self._cleared_epoch
            self._wake.wait(None if is_idle else self._limits.tick)

    def _converge(self) -> None:
        """Bring folder and writer in line with the rules. Raises OSError and CaptureError."""
        state = self._state
        if state.epoch != self._cleared_epoch:
            self._clear(state)
        if state.rules is None:
            return
        if state.rules is not self._applied and (state.rules is not self._tried or self._may_retry()):
            self._tried, self._retry_at = state.rules, 0.0
            self._prepare(state.rules)
        if state.rules is self._applied:
            self._check_writer(state.rules)
            self._sweep(state.rules)

    def _may_retry(self) -> bool:
        return time.monotonic() >= self._retry_at

    def _clear(self, state: RulesState) -> None:
        """Delete everything of earlier epochs."""
        self._stop_writer()
        with self._store.lock:
            self._queue.discard(lambda item: item.epoch < state.epoch)
            self._store.clear()
        self._cleared_epoch = state.epoch
        self._applied = self._tried = None
        self._problem, self._until_written, self.is_stopped = "", False, False

    def _prepare(self, rules: CaptureRules) -> None:
        """Open the folder with the bounds of the rules, and delete the records that they forbid.

        Rules that were replaced meanwhile delete nothing: the newer ones may permit what was just written.
        """
        with self._store.lock:
            state = self._state
            if state.rules is not rules:
                return
            gone = self._queue.discard(lambda item: state.forbids(item.record, item.epoch))
            self.counts.drop(Dropped.deleted, gone)
            self._store.open(Retention(rules.max_age_seconds, rules.max_bytes))
            self._store.delete_forbidden(rules.delete_before, only_permitted=rules.consent == "OptIn")
        self._applied = rules
        self._swept_at = time.monotonic()

    def _check_writer(self, rules: CaptureRules) -> None:
        """Start the writer of the rules' hook. Replace one that has ended or hangs, after the time of a retry."""
        self._stopped_writers = [one for one in self._stopped_writers if one.is_alive()]
        if self._writer is not None and self._writer.redact != rules.redact:
            self._stop_writer()
        if self._writer is not None:
            self._assess(self._writer)
        if self._writer is None and self._may_retry() and not self._is_held_up(rules.redact):
            self.is_stopped = False
            self._writer = RecordWriter(rules.redact, self._queue, self.counts, self._write, self._wake.set)
            self._writer.start()

    def _assess(self, writer: RecordWriter) -> None:
        activity, seconds = writer.activity() or ("", 0.0)
        if not writer.is_alive():
            self._writer = None
            if not writer.stopped:
                self._fail(writer.failure or "the capture thread ended", until_written=writer.disk_failed)
        elif activity == "redaction" and seconds > self._limits.hang:
            self._stop_writer()
            self._fail(f"the redaction hook {writer.redact} has not returned for {seconds:.0f} s")
        elif writer.is_ready and self._may_retry():
            self.is_stopped = False
            if not self._until_written:
                self._problem = ""

    def _stop_writer(self) -> None:
        """Stop the writer without waiting for it: it may hang in a hook."""
        if self._writer is not None:
            self._writer.stop()
            self._stopped_writers.append(self._writer)
            self._writer = None

    def _is_held_up(self, redact: str | None) -> bool:
        """Return whether a stopped writer with the same hook has not ended, or too many have not."""
        stopped = self._stopped_writers
        return len(stopped) >= MAX_HUNG_WRITERS or any(one.redact == redact for one in stopped)

    def _fail(self, problem: str, *, until_written: bool = False) -> None:
        """Stop capture until the rules change or the time of a retry has passed."""
        if problem != self._problem:
            log.warning("requests are not captured: %s", problem)
        self._problem, self._until_written = problem, until_written
        self.is_stopped = True
        self._retry_at = time.monotonic() + self._limits.retry
        self.counts.drop(Dropped.stopped, self._queue.discard(lambda _: True))

    def _sweep(self, rules: CaptureRules) -> None:
        if time.monotonic() < self._swept_at + self._store.sweep_seconds:
            return
        self._swept_at = time.monotonic()
        self._subjects.refresh()
        self._store.sweep()
        self._subjects.expire(rules.max_age_seconds)

    def _write(self, writer: RecordWriter, item: QueuedRecord, redacted: tuple[Record, bytes] | Dropped) -> bool:
        """Store a record unless the rules forbid it by now. Return False if it needs another hook. Raises OSError."""
        with self._store.lock:
            if item.unwanted:
                return True  # counted where it was discarded
            state = self._state
            if state.forbids(item.record, item.epoch):
                self.counts.drop(Dropped.deleted)
                return True
            is_current = state.rules is not None and state.rules.redact == writer.redact
            if not is_current or writer.stopped or state.epoch != self._cleared_epoch:
                return False
            if isinstance(redacted, Dropped):
                self.counts.drop(redacted)
                return True
            record, body = redacted
            if len(body) > self._store.largest:
                self.counts.drop(Dropped.too_large)
                return True
            self._subjects.store_for(record.user)
            self._store.append(record, body)
        self.counts.records[record.task] += 1
        if self._until_written:
            self._problem, self._until_written = "", False
        return True


# Finished segments of a folder, as a worker lists and serves them for distillation.
#
# A segment is finished when no writer appends to it any more. Writers close a segment after
# ``Retention.segment_seconds``, so its name, which has its time, is enough to know. The only writer of a folder closes
# its segment for a listing, so that the listing has all records.

FINISH_MARGIN_SECONDS = 10.0
"""Time after which a write that began before its segment was closed has ended."""
_Status = tuple[int, int, int]
"""Inode, time of modification and size: another one means that the segment must be hashed again."""


class FinishedSegments:
    """Reader of the finished segments of ``folder``. Its methods block, and ``listing`` reads all new segments.

    ``writer`` is None if other processes may write to the folder.
    """

    def __init__(self, folder: Path, retention: Retention, writer: Recorder | None) -> None:
        self._folder, self._writer = folder, writer
        self.retention = retention
        """Bounds in force. They may be replaced."""
        self._hashes: dict[str, tuple[_Status, str]] = {}

    def listing(self) -> SegmentListing:
        """Return the newest finished segments that have not expired. A segment is hashed once."""
        if self._writer is not None:
            self._writer.close_segment()
        now = time.time()
        segments = [one for one in list_segments(self._folder) if not self.retention.is_expired(one, now)]
        listed = []
        hashes: dict[str, tuple[_Status, str]] = {}
        for segment in segments[-MAX_LISTED:]:
            name = segment.path.name
            # A segment may be deleted at any time.
            with contextlib.suppress(SegmentNotFound), self.open(name) as file:
                status = _status(file)
                known = self._hashes.get(name)
                sha256 = known[1] if known and known[0] == status else hashlib.file_digest(file, "sha256").hexdigest()
                hashes[name] = (status, sha256)
                listed.append(ListedSegment(name=name, size=status[2], sha256=sha256))
        self._hashes = hashes
        return SegmentListing(segments=tuple(listed), max_age_seconds=self.retention.max_age_seconds)

    def open(self, name: str) -> io.FileIO:
        """Open a finished segment.

        Raises:
            SegmentNotFound: The folder has no finished segment of this name. A link or another path is none.
        """
        if re.fullmatch(SEGMENT_NAME, name) is None or not self._is_finished(name):
            raise SegmentNotFound(f"there is no finished segment {name[:64]}")
        try:
            # Without O_NONBLOCK, opening a named pipe would wait.
            file = os.fdopen(
                os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0
            )
        except OSError:
            raise SegmentNotFound(f"there is no finished segment {name}") from None
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_SEGMENT_BYTES:
            file.close()
            raise SegmentNotFound(f"there is no finished segment {name}")
        return file

    def _is_finished(self, name: str) -> bool:
        if self._writer is not None:
            return self._writer.is_closed(name)
        began_seconds = int(name.partition("-")[0]) / 1e6
        return began_seconds + self.retention.segment_seconds + FINISH_MARGIN_SECONDS < time.time()


def _status(file: BinaryIO) -> _Status:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_mtime_ns, status.st_size
