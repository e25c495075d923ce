"""Append-only segment files of records: crash-safe, shared by several workers, bounded in bytes and age.

A segment is MAGIC followed by frames. A frame is the length and the CRC-32 of its body (little-endian u32 each), then
the body. A frame truncated by a crash ends its segment. Every worker writes its own segments and deletes the oldest
segments of all workers, so that the bounds hold for the folder. A writer starts another segment if its current one was
deleted.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from specdecode_worker.capture.errors import FolderUnusable
from specdecode_worker.capture.record import Record, decode

MAGIC = b"SDCAP01\n"
SUFFIX = ".segment"
_FRAME = struct.Struct("<II")
_PARTS = 16
"""A segment is closed at this fraction of either bound, so a sweep never deletes more than that at once."""


class SegmentWriter:
    """Writer of one worker's segments.

    ``clock`` returns Unix seconds. Raises FolderUnusable if the folder cannot be written.
    """

    def __init__(
        self, folder: Path, *, max_bytes: int, max_age_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder, self._clock = folder, clock
        self._max_bytes, self._max_age_seconds = max_bytes, max_age_seconds
        self._segment_bytes = max_bytes // _PARTS
        self._file: int | None = None
        self._size, self._began, self._unswept = 0, 0.0, 0
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            mark = folder / f".{uuid.uuid4().hex}"
            mark.touch()
            mark.unlink()
        except OSError as error:
            raise FolderUnusable(f"{folder} cannot be written: {error.strerror}") from None

    @property
    def largest(self) -> int:
        """Size in bytes of the largest record that fits a segment."""
        return self._segment_bytes - len(MAGIC) - _FRAME.size

    @property
    def sweep_seconds(self) -> float:
        """Interval between sweeps in seconds, at which no record exceeds its age by more than a fraction."""
        return min(60.0, self._max_age_seconds / _PARTS)

    def append(self, body: bytes) -> None:
        """Append a record in one write, so that a crash can truncate only the last frame.

        Raises:
            OSError: the write failed or was incomplete.
        """
        frame = _FRAME.pack(len(body), zlib.crc32(body)) + body
        if self._file is not None and self._is_over(len(frame)):
            self.close()
        if self._file is None:
            self._open()
            self.sweep()
        assert self._file is not None
        if os.write(self._file, frame) != len(frame):
            self.close()  # the frame is incomplete, so nothing may follow it
            raise OSError("the segment could not take the whole record")
        self._size += len(frame)
        self._unswept += len(frame)
        if self._unswept > self._segment_bytes // _PARTS:
            self.sweep()

    def sweep(self) -> int:
        """Delete segments beyond the bounds of age and size, oldest first, and return the remaining bytes.

        Raises:
            OSError: a segment cannot be deleted.
        """
        self._unswept = 0
        segments = _segments(self._folder)
        total_bytes = sum(size for _, size, _ in segments)
        # Leave room for the records that all workers write until their next sweep.
        bound = self._max_bytes - self._segment_bytes
        for path, size, began in segments:
            # The name of a segment holds the time of its oldest record.
            too_old = began < self._clock() - self._max_age_seconds * (1 - 1 / _PARTS)
            if too_old or total_bytes > bound:
                path.unlink(missing_ok=True)
                total_bytes -= size
        return total_bytes

    def close(self) -> None:
        """Flush the current segment to disk and close it."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.fsync(self._file)
            os.close(self._file)
            self._file = None

    def _is_over(self, more: int) -> bool:
        assert self._file is not None
        too_old = self._clock() - self._began > self._max_age_seconds / _PARTS
        return too_old or self._size + more > self._segment_bytes or os.fstat(self._file).st_nlink == 0

    def _open(self) -> None:
        self._began = self._clock()
        name = f"{int(self._began * 1e6):018}-{uuid.uuid4().hex[:12]}{SUFFIX}"
        self._file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        os.write(self._file, MAGIC)
        self._size = len(MAGIC)


@dataclass(slots=True)
class ReadStats:
    """Counters of one read of the folders."""

    segments: int = 0
    torn: int = 0
    """Segments that end in a truncated frame, or do not start with MAGIC."""
    unreadable: int = 0
    """Complete frames that do not decode as a record."""


def read_records(folders: Sequence[Path], stats: ReadStats) -> Iterator[Record]:
    """Yield all records of the folders, by segment in the order of creation.

    Workers may write to the folders at the same time.

    Raises:
        FolderUnusable: one of ``folders`` is not a folder.
    """
    for folder in folders:
        if not folder.is_dir():
            raise FolderUnusable(f"{folder} is no folder; name the one that `serve --capture` was given")
        for path, _, _ in _segments(folder):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                continue  # deleted by a writer since the listing
            stats.segments += 1
            yield from _records(content, stats)


def _records(content: bytes, stats: ReadStats) -> Iterator[Record]:
    at = len(MAGIC)
    if not content.startswith(MAGIC):
        stats.torn += 1
        return
    while at < len(content):
        body = _body(content, at)
        if body is None:
            stats.torn += 1
            return
        at += _FRAME.size + len(body)
        try:
            yield decode(body)
        except msgspec.MsgspecError:
            stats.unreadable += 1


def _body(content: bytes, at: int) -> bytes | None:
    """Return the body of the frame at offset ``at``, or None if the frame is truncated or corrupt."""
    if at + _FRAME.size > len(content):
        return None
    length, checksum = _FRAME.unpack_from(content, at)
    body = content[at + _FRAME.size : at + _FRAME.size + length]
    return body if len(body) == length and zlib.crc32(body) == checksum else None


def _segments(folder: Path) -> list[tuple[Path, int, float]]:
    """Return (path, bytes, Unix seconds of creation) of each segment, oldest first."""
    segments = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        began = path.name.partition("-")[0]
        with contextlib.suppress(FileNotFoundError):
            if began.isdigit():
                segments.append((path, path.stat().st_size, int(began) / 1e6))
    return segments
