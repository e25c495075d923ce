"""Recorder of a worker, which captures by rules that may change while it serves, and what it sends of its folder."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from specdecode_worker.capture.live import CaptureLimits, ControlThread, LiveStore
from specdecode_worker.capture.records import (
    CaptureCounts,
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

_MAX_PROBLEM = 1000
_CLOCK_SECONDS = 60.0
"""Time by which ``delete_before`` may be in the future before the report says so."""


class Recorder:
    """Recorder of one worker.

    ``user_hashes``, ``delete_user`` and ``close`` block. All else may be called from the event loop. No failure of
    capture leaves this class.
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
        self._clock, self._limits = clock, limits
        self._random = random.Random(seed)
        self._subjects = SubjectKeys(folder, read_token)
        self._queue = RecordQueue()
        self._store = LiveStore(folder, self.counts, clock)
        self._control = ControlThread(rules, self._store, self._queue, self._subjects, self.counts, self._limits)

    @property
    def is_on(self) -> bool:
        """True if the plan switches capture on."""
        return self._control.state.rules is not None

    @property
    def consent(self) -> Consent:
        """Consent that requests need."""
        rules = self._control.state.rules
        return rules.consent if rules else "OptOut"

    @property
    def epoch(self) -> int:
        """Number of times that capture was switched off."""
        return self._control.state.epoch

    @property
    def retention(self) -> Retention | None:
        """Bounds of the folder; None while capture is off."""
        rules = self._control.state.rules
        return Retention(rules.max_age_seconds, rules.max_bytes) if rules else None

    def apply(self, rules: CaptureRules | None) -> None:
        """Follow ``rules`` from the next request on; None switches capture off and deletes what is stored."""
        self._control.apply(rules)

    def share_of(self, task: str) -> float:
        """Return the share of requests of ``task`` to capture."""
        rules = self._control.state.rules
        return rules.task_shares.get(task, rules.share) if rules else 0.0

    def should_capture(self, task: str) -> bool:
        """Return whether to capture this request of ``task``, by a random draw with its share."""
        if self._random.random() >= self.share_of(task):
            return False
        if self._control.is_stopped:
            self.counts.drop(Dropped.stopped)
            return False
        return True

    def subject_of(self, user: str | None) -> str:
        """Return the hash of a request's user; empty without one."""
        return self._subjects.hash_of(user)

    def enqueue(self, record: Record, epoch: int) -> None:
        """Queue the record of a request that began in ``epoch``; drop it if the queue is full or rules forbid it."""
        if self._control.is_stopped:
            self.counts.drop(Dropped.stopped)
        elif self._control.state.forbids(record, epoch):
            self.counts.drop(Dropped.deleted)
        elif not self._queue.put(QueuedRecord(record, epoch)):
            self.counts.drop(Dropped.queue_full)

    def report(self) -> CaptureReport:
        """Return the state for the worker's report."""
        totals = self._store.totals
        return CaptureReport(
            conversations=totals.records,
            stored_bytes=totals.size,
            oldest=totals.oldest,
            dropped={reason.value: count for reason in Dropped if (count := self.counts.dropped[reason])},
            problem=(self._control.problem or self._clock_problem())[:_MAX_PROBLEM] or None,
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
        if not self._store.lock.acquire(timeout=self._limits.lock):
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
        if self._store.lock.acquire(timeout=self._limits.lock):
            self._store.close_segment()
            self._store.lock.release()

    def is_closed(self, name: str) -> bool:
        """Return whether the segment ``name`` of the folder is not open."""
        return self._store.is_closed(name)

    def close(self, seconds: float = 5.0) -> None:
        """Write the queued records and stop the threads, waiting at most ``seconds``."""
        end = time.monotonic() + seconds
        self._control.close(seconds)
        if self._store.lock.acquire(timeout=max(end - time.monotonic(), 0)):
            self._store.close()
            self._store.lock.release()

    def _clock_problem(self) -> str:
        """Return the problem of a ``delete_before`` that lies in this worker's future."""
        rules = self._control.state.rules
        ahead = rules.delete_before - self._clock() if rules else 0.0
        if ahead <= _CLOCK_SECONDS:
            return ""
        return f"delete_before is {ahead:.0f} s ahead of this worker's clock; nothing is captured until then"


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
