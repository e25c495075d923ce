"""Deletion of one user's records from a folder of segments, while workers may write to it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from specdecode_worker.capture.records import FolderUnusable, decode_stamp
from specdecode_worker.capture.segments import UserHashes, delete_records, list_segments, stored_keys


@dataclass(slots=True)
class DeletionCounts:
    """Result of a deletion."""

    records: int = 0
    """Stored records of the user that were deleted."""
    queued: int = 0
    """Records of the user that waited to be written."""
    segments: int = 0
    """Segments that were rewritten or deleted."""
    unreadable: int = 0
    """Segments and frames that cannot be read, which may hold records of the user until they expire."""
    undecidable: int = 0
    """Records whose hash was made with a key that is not known. They may be of the user."""


def delete_user_records(folder: Path, user: str, keys: Iterable[bytes] = ()) -> DeletionCounts:
    """Delete the records of requests whose field ``user`` was ``user``.

    A segment is replaced by one without these records, or deleted if nothing remains. Its name, and with it its age,
    stays. Truncated ends of segments are dropped, because they may hold a record of the user.

    Args:
        folder: Folder of segments.
        user: Value of the requests' field.
        keys: Keys of hashes in addition to those that the folder holds.

    Raises:
        FolderUnusable: ``folder`` is not a folder, or a segment cannot be read or replaced.
    """
    hashes = UserHashes(user, (*stored_keys(folder).values(), *keys))
    if not folder.is_dir():
        raise FolderUnusable(f"{folder} is no folder; name the one that `serve --capture` was given")
    counts = DeletionCounts()
    try:
        for segment in list_segments(folder):
            _delete_from(segment.path, hashes, counts)
        flush_folder(folder)
    except OSError as error:
        raise FolderUnusable(f"{error.filename or folder} cannot be rewritten: {error.strerror or error}") from None
    return counts


def _delete_from(path: Path, hashes: UserHashes, counts: DeletionCounts) -> None:
    unreadable = undecidable = 0

    def is_of_user(body: bytes) -> bool:
        nonlocal unreadable, undecidable
        try:
            stored = decode_stamp(body).user
        except msgspec.MsgspecError:
            unreadable += 1
            return False
        undecidable += hashes.is_undecidable(stored)
        return hashes.matches(stored)

    result = delete_records(path, is_of_user)
    counts.records += result.deleted
    counts.segments += result.changed
    counts.unreadable += unreadable + (not result.readable)
    counts.undecidable += undecidable


def flush_folder(folder: Path) -> None:
    """Flush the folder's entries to disk, so that a crash does not bring deleted segments back. Raise OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
