"""Finished segments of a folder, as a worker lists and serves them for distillation.

A segment is finished when no writer appends to it any more. Writers close a segment after
``Retention.segment_seconds``, so its name, which has its time, is enough to know. The only writer of a folder closes
its segment for a listing, so that the listing has all records.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

from pydantic import Field

from specdecode_worker.capture.errors import SegmentNotFound
from specdecode_worker.capture.retention import Retention
from specdecode_worker.capture.segment_format import list_segments
from specdecode_worker.contract.wire import Received

SEGMENT_NAME = r"^[0-9]{18}-[0-9a-f]{12}\.segment$"
MAX_SEGMENT_BYTES = 2**31
MAX_LISTED = 4096
"""Segments of a listing, the newest: 14 days of segments of 5 minutes each."""
READ_BYTES = 256 * 1024
"""Bytes read at once, which bound the memory of hashing and of a transfer."""
FINISH_MARGIN_SECONDS = 10.0
"""Time after which a write that began before its segment was closed has ended."""

_Status = tuple[int, int, int]
"""Inode, time of modification and size: another one means that the segment must be hashed again."""


class ListedSegment(Received):
    """One finished segment."""

    name: str = Field(pattern=SEGMENT_NAME)
    size: int = Field(ge=0, le=MAX_SEGMENT_BYTES)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class SegmentListing(Received):
    """The finished segments of a worker's folder, oldest first, and the maximum age of their records."""

    segments: tuple[ListedSegment, ...] = Field(default=(), max_length=MAX_LISTED)
    max_age_seconds: float = Field(gt=0, allow_inf_nan=False)


class OnlyWriter(Protocol):
    """Writer of a folder that no other process writes."""

    def close_segment(self) -> None:
        """Close the open segment. The next record begins another one. Blocks, and never raises OSError."""

    def is_closed(self, name: str) -> bool:
        """Return whether the segment ``name`` of the folder is not open."""


class FinishedSegments:
    """Reader of the finished segments of ``folder``. Its methods block, and ``listing`` reads all new segments.

    ``writer`` is None if other processes may write to the folder.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention,
        writer: OnlyWriter | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._writer, self._clock = folder, writer, clock
        self.retention = retention
        """Bounds in force. They may be replaced."""
        self._hashes: dict[str, tuple[_Status, str]] = {}

    def listing(self) -> SegmentListing:
        """Return the newest finished segments that have not expired. A segment is hashed once."""
        if self._writer is not None:
            self._writer.close_segment()
        now = self._clock()
        segments = [one for one in list_segments(self._folder) if not self.retention.is_expired(one, now)]
        listed = []
        hashes: dict[str, tuple[_Status, str]] = {}
        for segment in segments[-MAX_LISTED:]:
            name = segment.path.name
            # A segment may be deleted at any time.
            with contextlib.suppress(SegmentNotFound), self.open(name) as file:
                status = _status(file)
                known = self._hashes.get(name)
                sha256 = known[1] if known and known[0] == status else hash_file(file)
                hashes[name] = (status, sha256)
                listed.append(ListedSegment(name=name, size=status[2], sha256=sha256))
        self._hashes = hashes
        return SegmentListing(segments=tuple(listed), max_age_seconds=self.retention.max_age_seconds)

    def open(self, name: str) -> BinaryIO:
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
        return began_seconds + self.retention.segment_seconds + FINISH_MARGIN_SECONDS < self._clock()


def hash_file(file: BinaryIO) -> str:
    """Return the SHA-256 of an open file, read in pieces."""
    digest = hashlib.sha256()
    while piece := file.read(READ_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def _status(file: BinaryIO) -> _Status:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_mtime_ns, status.st_size
