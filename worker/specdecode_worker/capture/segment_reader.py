"""Reader of the records in segment files. Workers may write to the folders at the same time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from specdecode_worker.capture.errors import FolderUnusable
from specdecode_worker.capture.record import Record, decode
from specdecode_worker.capture.retention import delete_expired, stored_retention
from specdecode_worker.capture.segment_format import Segment, list_segments, read_bodies


@dataclass(slots=True)
class ReadStats:
    """Counters of one read of the folders."""

    segments: int = 0
    torn: int = 0
    """Segments that end in a truncated frame, or do not start with MAGIC."""
    unreadable: int = 0
    """Complete frames that do not decode as a record."""


def read_records(folders: Sequence[Path], stats: ReadStats, clock: Callable[[], float] = time.time) -> Iterator[Record]:
    """Yield all records of the folders, by segment in the order of creation.

    Segments that have expired since the last worker ran are deleted, and left out if they cannot be deleted.

    Raises:
        FolderUnusable: one of ``folders`` is not a folder.
    """
    for folder in folders:
        if not folder.is_dir():
            raise FolderUnusable(f"{folder} is no folder; name the one that `serve --capture` was given")
        for segment in _valid_segments(folder, clock()):
            try:
                file = segment.path.open("rb")
            except FileNotFoundError:
                continue  # deleted by a writer since the listing
            with file:
                stats.segments += 1
                yield from _records(file, stats)


def _valid_segments(folder: Path, now: float) -> list[Segment]:
    """Return the segments that have not expired, and delete the others."""
    retention = stored_retention(folder)
    if retention is None:
        return list_segments(folder)
    with contextlib.suppress(OSError):  # a folder may be mounted for reading only
        delete_expired(folder, retention.max_age_seconds, now)
    return [segment for segment in list_segments(folder) if not retention.is_expired(segment, now)]


def _records(file: BinaryIO, stats: ReadStats) -> Iterator[Record]:
    for body in read_bodies(file):
        if body is None:
            stats.torn += 1
            return
        try:
            yield decode(body)
        except msgspec.MsgspecError:
            stats.unreadable += 1
