"""Parts of a recorder: rules in force, the thread that redacts and writes records, and the folder with its index."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from specdecode_worker.capture.records import (
    CaptureCounts,
    CaptureError,
    Dropped,
    Hook,
    QueuedRecord,
    Record,
    RecordQueue,
    Stamp,
    decode_stamp,
    load_hook,
    redact_and_encode,
)
from specdecode_worker.capture.segments import (
    FRAME_OVERHEAD,
    KEY_SUFFIX,
    RETENTION_FILE,
    REWRITE_SUFFIX,
    SUFFIX,
    DeletionCounts,
    Retention,
    SegmentWriter,
    UserHashes,
    delete_records,
    delete_segment,
    list_segments,
    read_bodies,
)
from specdecode_worker.contract.capture import CaptureRules
from specdecode_worker.files import flush

# Rules in force, as all threads of the capture read them, and times.


@dataclass(frozen=True, slots=True)
class RulesState:
    """Rules in force; None switches capture off.

    ``epoch`` counts how often capture was switched off. Requests that began in an earlier epoch are not captured.
    """

    rules: CaptureRules | None
    epoch: int

    def forbids(self, record: Record, epoch: int) -> bool:
        """Return whether the record of a request that began in ``epoch`` must not be stored."""
        rules = self.rules
        return (
            rules is None
            or epoch != self.epoch
            or record.time_seconds < rules.delete_before
            or (rules.consent == "OptIn" and not record.permitted)
        )


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """Times of the capture in seconds."""

    retry: float = 60.0
    """Time after a failure until capture is tried again."""
    hang: float = 10.0
    """Time after which a redaction hook counts as hung, and a disk as not answering."""
    tick: float = 1.0
    """Interval at which the control thread looks at the writer."""


# Thread that redacts records and hands them to the store. It can be abandoned when a redaction hook hangs.

Store = Callable[["RecordWriter", QueuedRecord, tuple[Record, bytes] | Dropped], bool]
"""Stores a redacted record with its encoding, or counts it as dropped. Returns False if another writer must redact it.

Raises OSError if the disk refuses it.
"""


class RecordWriter(threading.Thread):
    """Thread that writes the records of one redaction hook; None writes them as they are.

    ``failure`` is the reason why the thread ended by itself. It never has text of a record.
    """

    def __init__(
        self, redact: str | None, queue: RecordQueue, counts: CaptureCounts, store: Store, ended: Callable[[], None]
    ) -> None:
        super().__init__(name="capture", daemon=True)
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
        self.join(seconds)

    def run(self) -> None:
        """Load the hook, and write records until the writer is stopped, or fails."""
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
        while (item := self._queue.take(self._may_take)) is not None:
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


# Folder of one worker's captures, with an index of its segments, so that totals and deletions need no scan.

_PAUSE_BYTES = 2**20
_PAUSE_SECONDS = 0.005
"""Pause of a thread that reads segments after every _PAUSE_BYTES, so that the event loop gets the interpreter."""
_CREATED_SUFFIXES = (SUFFIX, REWRITE_SUFFIX, KEY_SUFFIX)


@dataclass(frozen=True, slots=True)
class StoredTotals:
    """Stored records; ``oldest`` is the time of the oldest one in Unix seconds, None without any."""

    records: int = 0
    oldest: float | None = None


@dataclass(slots=True)
class _Summary:
    """Contents of one segment."""

    size: int = 0
    records: int = 0
    oldest: float = float("inf")
    newest: float = float("-inf")
    not_permitted: int = 0
    """Records whose clients did not expressly permit capture."""

    def add(self, stamp: Stamp | Record) -> None:
        self.records += 1
        self.oldest = min(self.oldest, stamp.time_seconds)
        self.newest = max(self.newest, stamp.time_seconds)
        self.not_permitted += not stamp.permitted


class LiveStore:
    """Store of one folder. Other workers may write segments of their own to it; their records count once they are read.

    Its methods block, and hold ``lock``. A caller that needs several steps as one holds it too. ``totals`` may be read
    without it.
    """

    def __init__(self, folder: Path, counts: CaptureCounts, clock: Callable[[], float]) -> None:
        self.lock = threading.RLock()
        self.totals = StoredTotals()
        self.folder = folder
        self._counts, self._clock = counts, clock
        self._writer: SegmentWriter | None = None
        self._index: dict[str, _Summary] = {}
        self._seen_sweeps = 0

    @property
    def largest(self) -> int:
        """Size in bytes of the largest record that can be stored; 0 while the store is not open."""
        return self._writer.largest if self._writer is not None else 0

    @property
    def sweep_seconds(self) -> float:
        """Interval between sweeps in seconds."""
        return self._writer.sweep_seconds if self._writer is not None else 1.0

    def open(self, retention: Retention) -> None:
        """Create the folder, or open it with what it holds, and enforce the bounds.

        Raises:
            FolderUnusable: The folder cannot be written.
            OSError: A segment cannot be read or deleted.
        """
        with self.lock:
            if self._writer is None or retention != self._writer.retention:
                self.close()
                self._writer = SegmentWriter(self.folder, retention, self._clock)
                self._seen_sweeps = 0
            self.sweep()

    def append(self, record: Record, body: bytes) -> None:
        """Append a record, whose encoding is ``body``. Raise OSError if it could not be written."""
        with self.lock:
            assert self._writer is not None, "a store is opened before records are written"
            self._writer.append(body)
            summary = self._index.setdefault(self._writer.path.name, _Summary())
            summary.add(record)
            summary.size += FRAME_OVERHEAD + len(body)
            if self._writer.sweeps != self._seen_sweeps:
                self._read_folder()
            else:
                self._update_totals()

    def sweep(self) -> None:
        """Delete segments beyond the bounds. Raise OSError."""
        with self.lock:
            if self._writer is not None:
                self._writer.sweep()
                self._read_folder()

    def delete_forbidden(self, before_seconds: float, *, only_permitted: bool) -> None:
        """Delete records older than ``before_seconds``, and those without express permission if ``only_permitted``.

        A segment that cannot be rewritten, as on a full disk, is deleted as a whole, and so is one without any record
        that can be read.

        Raises:
            OSError: A segment cannot be deleted.
        """

        def is_forbidden(stamp: Stamp) -> bool:
            return stamp.time_seconds < before_seconds or (only_permitted and not stamp.permitted)

        with self.lock:
            for name, summary in list(self._index.items()):
                if summary.newest < before_seconds or (only_permitted and summary.not_permitted == summary.records):
                    delete_segment(self.folder / name)
                elif summary.oldest < before_seconds or (only_permitted and summary.not_permitted):
                    self._delete_from(name, is_forbidden, DeletionCounts())
            self._read_folder()

    def delete_user(self, hashes: UserHashes) -> DeletionCounts:
        """Delete the records with one of ``hashes``. Raise OSError."""
        counts = DeletionCounts()

        def is_of_user(stamp: Stamp) -> bool:
            counts.undecidable += hashes.is_undecidable(stamp.user)
            return hashes.matches(stamp.user)

        with self.lock:
            for segment in list_segments(self.folder):
                self._delete_from(segment.path.name, is_of_user, counts)
            self._read_folder()
            if self.folder.is_dir():
                flush(self.folder)
        return counts

    def clear(self) -> None:
        """Delete everything that the store wrote. Raise OSError."""
        with self.lock:
            self.close()
            for path in self.folder.glob("*"):
                if path.suffix in _CREATED_SUFFIXES or path.name == RETENTION_FILE or _is_partial(path):
                    path.unlink(missing_ok=True)
            self._index = {}
            self._update_totals()

    def close_segment(self) -> None:
        """Flush and close the open segment. The next record begins another one."""
        with self.lock:
            if self._writer is not None:
                self._writer.close()

    def is_closed(self, name: str) -> bool:
        """Return whether the segment ``name`` is not open. Needs no lock."""
        writer = self._writer
        path = writer.open_path if writer is not None else None
        return path is None or path.name != name

    def close(self) -> None:
        """Flush and close the open segment, and write nothing until ``open`` is called."""
        with self.lock:
            self.close_segment()
            self._writer = None

    def _delete_from(self, name: str, is_unwanted: Callable[[Stamp], bool], counts: DeletionCounts) -> None:
        remaining, path, read = _Summary(), self.folder / name, 0

        def is_unwanted_body(body: bytes) -> bool:
            nonlocal read
            read = _pause_after(read + len(body))
            try:
                stamp = decode_stamp(body)
            except msgspec.MsgspecError:
                return True  # nobody could tell when it must be deleted
            if is_unwanted(stamp):
                return True
            remaining.add(stamp)
            return False

        try:
            is_segment = delete_records(path, is_unwanted_body, counts)
        except OSError:
            delete_segment(path)
            self._index.pop(name, None)
            counts.segments += 1
            return
        if not is_segment:
            delete_segment(path)
            counts.segments += 1
        self._index[name] = remaining

    def _read_folder(self) -> None:
        """Make the index agree with the folder. Segments that are not in it are read."""
        if self._writer is not None:
            self._seen_sweeps = self._writer.sweeps
        index = {}
        for segment in list_segments(self.folder):
            name = segment.path.name
            with contextlib.suppress(FileNotFoundError):
                index[name] = self._index.get(name) or _summary_of(segment.path)
                index[name].size = segment.size
        self._index = index
        self._update_totals()

    def _update_totals(self) -> None:
        summaries = self._index.values()
        records = sum(one.records for one in summaries)
        oldest = min((one.oldest for one in summaries if one.records), default=None)
        self._counts.stored_bytes = sum(one.size for one in summaries)
        self.totals = StoredTotals(records, oldest)


def _summary_of(path: Path) -> _Summary:
    summary, read = _Summary(), 0
    with path.open("rb") as file:
        for body in read_bodies(file):
            with contextlib.suppress(msgspec.MsgspecError):
                if body is not None:
                    summary.add(decode_stamp(body))
                    read = _pause_after(read + len(body))
    return summary


def _pause_after(read: int) -> int:
    """Pause after _PAUSE_BYTES. Return the bytes that were read since the last pause."""
    if read < _PAUSE_BYTES:
        return read
    time.sleep(_PAUSE_SECONDS)
    return 0


def _is_partial(path: Path) -> bool:
    """Return whether a file is left over from an interrupted write of a small file."""
    return path.name.startswith(".") and len(path.name) == 33 and path.is_file()
