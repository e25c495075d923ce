"""Writer of segment files: crash-safe, shared by several workers, bounded in bytes and age.

Every worker writes its own segments and deletes the oldest segments of all workers, so that the bounds hold for the
folder. A writer starts another segment if its current one was deleted or rewritten. A write that fails, as on a full
disk, leaves only whole frames behind.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from specdecode_worker.capture.errors import FolderUnusable
from specdecode_worker.capture.retention import PARTS, Retention, store_retention, sweep
from specdecode_worker.capture.segment_format import FRAME_OVERHEAD, MAGIC, frame_of, locked, segment_name

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TRIES = 3
"""Segments to try for one record. A fresh segment is gone only if the folder is emptied at that moment."""

log = logging.getLogger(__name__)


class SegmentWriter:
    """Writer of one worker's segments.

    ``clock`` returns Unix seconds. Raises FolderUnusable if the folder cannot be written. A full disk is no error: the
    writer works once there is space.
    """

    def __init__(
        self, folder: Path, *, max_bytes: int, max_age_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder, self._clock = folder, clock
        self._retention = Retention(max_age_seconds, max_bytes)
        self._retention_stored = False
        self._file: int | None = None
        self._path = folder
        self._size, self._began, self._unswept = 0, 0.0, 0
        self.sweeps = 0
        """Sweeps so far. After each, older segments may be gone."""
        try:
            self._prepare_folder()
            mark = folder / f".{uuid.uuid4().hex}"
            mark.touch()
            mark.unlink()
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise FolderUnusable(f"{folder} cannot be written: {error.strerror}") from None
            log.warning("%s has no space left; requests are captured once there is some", folder)

    @property
    def largest(self) -> int:
        """Size in bytes of the largest record that fits a segment."""
        return self._retention.segment_bytes - len(MAGIC) - FRAME_OVERHEAD

    @property
    def path(self) -> Path:
        """Segment of the last record."""
        return self._path

    @property
    def open_path(self) -> Path | None:
        """Segment that the next record may be appended to; None if the next record begins another one."""
        return self._path if self._file is not None else None

    @property
    def sweep_seconds(self) -> float:
        """Interval between sweeps in seconds, at which no record exceeds its age by more than a fraction."""
        return min(60.0, self._retention.segment_seconds)

    def append(self, body: bytes) -> None:
        """Append a record.

        Raises:
            OSError: The record could not be written. What is on disk can be read, and the next call tries again.
        """
        frame = frame_of(body)
        for _ in range(_TRIES):
            file = self._segment_for(len(frame))
            with locked(file):
                if not os.fstat(file).st_nlink:
                    continue  # deleted or rewritten in the meantime
                self._write(file, frame)
            break
        else:
            raise OSError(errno.ENOENT, f"the segments in {self._folder} are deleted as soon as they are made")
        self._unswept += len(frame)
        if self._unswept > self._retention.segment_bytes // PARTS:
            self._try_to_sweep()

    def sweep(self) -> int:
        """Delete segments beyond the bounds of age and size, oldest first, and return the remaining bytes.

        Raises:
            OSError: A segment cannot be deleted.
        """
        self._unswept = 0
        self.sweeps += 1
        return sweep(self._folder, self._retention, self._clock())

    def close(self) -> None:
        """Flush the current segment to disk and close it."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._file)
            os.close(self._file)
            self._file = None

    def _segment_for(self, more: int) -> int:
        """Return the open segment that takes ``more`` bytes."""
        if self._file is not None and self._is_over(more):
            self.close()
        if self._file is None:
            self._file = self._new_segment()
            self._try_to_sweep()
        return self._file

    def _is_over(self, more: int) -> bool:
        assert self._file is not None
        too_old = self._clock() - self._began > self._retention.segment_seconds
        too_large = self._size + more > self._retention.segment_bytes
        return too_old or too_large or os.fstat(self._file).st_nlink == 0

    def _new_segment(self) -> int:
        """Create a segment with its head and open it. Nothing is left of a segment whose head cannot be written."""
        self._prepare_folder()
        self._began = self._clock()
        self._path = self._folder / segment_name(self._began)
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            _write_whole(file, MAGIC)
        except OSError:
            os.close(file)
            self._path.unlink(missing_ok=True)
            raise
        self._size = len(MAGIC)
        return file

    def _write(self, file: int, frame: bytes) -> None:
        """Append a frame, or cut what was written of it."""
        try:
            _write_whole(file, frame)
        except OSError:
            self._cut(file)
            raise
        self._size += len(frame)

    def _cut(self, file: int) -> None:
        """Cut the segment after its last whole frame. Close it if that fails, and delete it if it has no frame."""
        is_empty = self._size == len(MAGIC)
        try:
            os.ftruncate(file, self._size)
        except OSError:
            is_cut = False
        else:
            is_cut = not is_empty
        if not is_cut:
            self.close()  # nothing may follow an incomplete frame
        if is_empty:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _try_to_sweep(self) -> None:
        """Sweep; the periodic sweep reports a failure, which must not lose the record that was written."""
        with contextlib.suppress(OSError):
            self.sweep()

    def _prepare_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._retention_stored:
            store_retention(self._folder, self._retention)
            self._retention_stored = True


def _write_whole(file: int, content: bytes) -> None:
    """Write ``content`` in one call. Raise OSError if it was not written as a whole."""
    written = os.write(file, content)
    if written != len(content):
        raise OSError(errno.ENOSPC, f"only {written} of {len(content)} bytes could be written")
