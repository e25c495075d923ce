"""Folder of one worker's captures, with an index of its segments, so that totals and deletions need no scan."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from specdecode_worker.capture.record import Record, Stamp, decode_stamp
from specdecode_worker.capture.retention import RETENTION_FILE, REWRITE_SUFFIX, Retention
from specdecode_worker.capture.segment_format import FRAME_OVERHEAD, SUFFIX, list_segments, read_bodies
from specdecode_worker.capture.segment_rewriting import delete_records
from specdecode_worker.capture.segments import SegmentWriter
from specdecode_worker.capture.subject_keys import KEY_SUFFIX, UserHashes
from specdecode_worker.capture.user_deletion import DeletionCounts, flush_folder

_PAUSE_BYTES = 2**20
_PAUSE_SECONDS = 0.005
"""Pause of a thread that reads segments after every _PAUSE_BYTES, so that the event loop gets the interpreter."""
_CREATED_SUFFIXES = (SUFFIX, REWRITE_SUFFIX, KEY_SUFFIX)


@dataclass(frozen=True, slots=True)
class StoredTotals:
    """Stored records; ``oldest`` is the time of the oldest one in Unix seconds, None without any."""

    records: int = 0
    size: int = 0
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

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.lock = threading.RLock()
        self.totals = StoredTotals()
        self.folder = folder
        self._clock = clock
        self._retention: Retention | None = None
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
            if self._writer is None or retention != self._retention:
                self.close()
                self._writer = SegmentWriter(
                    self.folder,
                    max_bytes=retention.max_bytes,
                    max_age_seconds=retention.max_age_seconds,
                    clock=self._clock,
                )
                self._retention, self._seen_sweeps = retention, 0
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
                    (self.folder / name).unlink(missing_ok=True)
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
                flush_folder(self.folder)
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
            result = delete_records(path, is_unwanted_body)
        except OSError:
            path.unlink(missing_ok=True)
            self._index.pop(name, None)
            counts.segments += 1
            return
        if not result.readable:
            path.unlink(missing_ok=True)
        counts.records += result.deleted
        counts.segments += result.changed or not result.readable
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
        self.totals = StoredTotals(records, sum(one.size for one in summaries), oldest)


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
