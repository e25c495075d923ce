"""Deletion of one user's records from a folder of segments, while workers may write to it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from specdecode_worker.capture.errors import FolderUnusable
from specdecode_worker.capture.record import decode, user_hash
from specdecode_worker.capture.retention import REWRITE_SUFFIX
from specdecode_worker.capture.segment_format import MAGIC, frame_of, list_segments, locked, read_bodies


@dataclass(slots=True)
class DeletionCounts:
    """Result of a deletion."""

    records: int = 0
    """Records of the user that were deleted."""
    segments: int = 0
    """Segments that were rewritten or deleted."""
    unreadable: int = 0
    """Segments and frames that cannot be read, which may hold records of the user until they expire."""


def delete_user_records(folder: Path, user: str) -> DeletionCounts:
    """Delete the records of requests whose field ``user`` was ``user``.

    A segment is replaced by one without these records, or deleted if nothing remains. Its name, and with it its age,
    stays. Truncated ends of segments are dropped, because they may hold a record of the user.

    Raises:
        FolderUnusable: ``folder`` is not a folder, or a segment cannot be read or replaced.
    """
    if not folder.is_dir():
        raise FolderUnusable(f"{folder} is no folder; name the one that `serve --capture` was given")
    counts, wanted = DeletionCounts(), user_hash(user)
    try:
        for segment in list_segments(folder):
            # A segment that another process replaced in the meantime is read again.
            while not _delete_from(segment.path, wanted, counts):
                pass
        _flush_folder(folder)
    except OSError as error:
        raise FolderUnusable(f"{error.filename or folder} cannot be rewritten: {error.strerror or error}") from None
    return counts


def _delete_from(path: Path, wanted: str, counts: DeletionCounts) -> bool:
    """Delete the records with the hash ``wanted`` from one segment. Return False if it was replaced meanwhile."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return True
    with file, locked(file.fileno()):
        if not os.fstat(file.fileno()).st_nlink:
            return False
        content = file.read()
        if not content.startswith(MAGIC):
            counts.unreadable += 1
            return True
        bodies = list(read_bodies(content))
        remaining = [body for body in bodies if body is not None and not _is_of_user(body, wanted, counts)]
        if len(remaining) == len(bodies):
            return True
        counts.records += sum(body is not None for body in bodies) - len(remaining)
        counts.segments += 1
        _replace(path, remaining, os.fstat(file.fileno()))
    return True


def _is_of_user(body: bytes, wanted: str, counts: DeletionCounts) -> bool:
    try:
        return decode(body).user == wanted
    except msgspec.MsgspecError:
        counts.unreadable += 1
        return False


def _replace(path: Path, bodies: list[bytes], status: os.stat_result) -> None:
    """Replace a segment by one with these bodies and the same owner and mode; delete it if there are none."""
    if not bodies:
        path.unlink()
        return
    other = path.with_suffix(REWRITE_SUFFIX)
    try:
        with other.open("wb") as file:
            os.fchmod(file.fileno(), status.st_mode & 0o777)
            with contextlib.suppress(PermissionError):
                os.fchown(file.fileno(), status.st_uid, status.st_gid)
            file.write(MAGIC + b"".join(map(frame_of, bodies)))
            file.flush()
            os.fsync(file.fileno())
        other.replace(path)
    except OSError:
        other.unlink(missing_ok=True)
        raise


def _flush_folder(folder: Path) -> None:
    """Flush the folder's entries to disk, so that a crash does not bring deleted segments back."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
