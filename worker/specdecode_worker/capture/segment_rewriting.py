"""Deletion of single records from a segment file, while its writer may append to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from specdecode_worker.capture.retention import REWRITE_SUFFIX
from specdecode_worker.capture.segment_format import FRAME_OVERHEAD, MAGIC, locked, read_bodies

_COPY_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Rewriting:
    """Result for one segment."""

    deleted: int = 0
    """Records that were deleted."""
    changed: bool = False
    """True if the segment was replaced or deleted."""
    readable: bool = True
    """False if the file is no segment. It stays as it is."""


def delete_records(path: Path, is_unwanted: Callable[[bytes], bool]) -> Rewriting:
    """Delete the records for whose encoded bodies ``is_unwanted`` holds from one segment.

    The segment is replaced by one without them, of the same name, owner and mode, or deleted if none remain. A
    truncated end is dropped, because it may hold such a record.

    Raises:
        OSError: The segment cannot be read or replaced.
    """
    while True:
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return Rewriting()
        with file, locked(file.fileno()):
            if os.fstat(file.fileno()).st_nlink:
                return _delete_from(file, path, is_unwanted)


def _delete_from(file: BinaryIO, path: Path, is_unwanted: Callable[[bytes], bool]) -> Rewriting:
    if file.read(len(MAGIC)) != MAGIC:
        return Rewriting(readable=False)
    file.seek(0)
    wanted: list[tuple[int, int]] = []
    deleted, is_torn, at = 0, False, len(MAGIC)
    for body in read_bodies(file):
        if body is None:
            is_torn = True
            break
        size = FRAME_OVERHEAD + len(body)
        if is_unwanted(body):
            deleted += 1
        elif wanted and sum(wanted[-1]) == at:
            wanted[-1] = (wanted[-1][0], wanted[-1][1] + size)
        else:
            wanted.append((at, size))
        at += size
    if not deleted and not is_torn:
        return Rewriting()
    _replace(path, file, wanted)
    return Rewriting(deleted, changed=True)


def _replace(path: Path, source: BinaryIO, ranges: list[tuple[int, int]]) -> None:
    """Replace a segment by one with these ranges of bytes; delete it if there are none."""
    if not ranges:
        path.unlink(missing_ok=True)
        return
    status = os.fstat(source.fileno())
    other = path.with_suffix(REWRITE_SUFFIX)
    try:
        with open(other, "wb", opener=_private) as file:
            os.fchmod(file.fileno(), status.st_mode & 0o777)
            with contextlib.suppress(PermissionError):
                os.fchown(file.fileno(), status.st_uid, status.st_gid)
            file.write(MAGIC)
            for at, size in ranges:
                _copy(source, file, at, size)
            file.flush()
            os.fsync(file.fileno())
        other.replace(path)
    except OSError:
        other.unlink(missing_ok=True)
        raise


def _copy(source: BinaryIO, target: BinaryIO, at: int, size: int) -> None:
    source.seek(at)
    while size > 0:
        piece = source.read(min(size, _COPY_BYTES))
        target.write(piece)
        size -= len(piece)
        if not piece:
            return


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
