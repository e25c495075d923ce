"""Segment files of captured records: writing, reading, listing, retention, and deletion of single records."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import struct
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
from pydantic import Field

from specdecode_worker.capture.records import FolderUnusable, Record, decode, decode_stamp
from specdecode_worker.contract.wire import Received
from specdecode_worker.files import flush

log = logging.getLogger(__name__)

# Format of segment files of captured records.
#
# A segment is MAGIC followed by frames. A frame is the length and the CRC-32 of its body (little-endian u32 each), then
# the body. A truncated or corrupt frame ends its segment. The name of a segment starts with the time of its oldest
# record in microseconds.

MAGIC = b"SDCAP01\n"
SUFFIX = ".segment"
_HEAD = struct.Struct("<II")
FRAME_OVERHEAD = _HEAD.size
"""Bytes of a frame in addition to its body."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment file; ``began_seconds`` is the Unix time of its oldest record."""

    path: Path
    size: int
    began_seconds: float


def segment_name(began_seconds: float) -> str:
    """Return the unique name of a new segment."""
    return f"{int(began_seconds * 1e6):018}-{uuid.uuid4().hex[:12]}{SUFFIX}"


def list_segments(folder: Path) -> list[Segment]:
    """Return the segments of a folder, oldest first."""
    segments = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        began = path.name.partition("-")[0]
        with contextlib.suppress(FileNotFoundError):
            if began.isdigit():
                segments.append(Segment(path, path.stat().st_size, int(began) / 1e6))
    return segments


def frame_of(body: bytes) -> bytes:
    """Return the frame of a body."""
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def read_bodies(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the bodies of a segment's frames, and None at the end if the rest cannot be read.

    One frame is in memory at a time. After each body, ``file`` is at the end of its frame.
    """
    size = os.fstat(file.fileno()).st_size
    at = len(MAGIC)
    if file.read(len(MAGIC)) != MAGIC:
        yield None
        return
    while at < size:
        body = _next_body(file, size - at)
        yield body
        if body is None:
            return
        at += FRAME_OVERHEAD + len(body)


def _next_body(file: BinaryIO, left: int) -> bytes | None:
    """Return the body of the next frame, or None if the frame is truncated or corrupt."""
    head = file.read(FRAME_OVERHEAD)
    if len(head) < FRAME_OVERHEAD:
        return None
    length, checksum = _HEAD.unpack(head)
    if length > left - FRAME_OVERHEAD:
        return None
    body = file.read(length)
    return body if len(body) == length and zlib.crc32(body) == checksum else None


@contextlib.contextmanager
def locked(file: int) -> Iterator[None]:
    """Hold the lock of an open segment, so that nothing is appended to it while it is rewritten.

    File systems without locks are used without.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


# Retention of captured records: the maximum age, stored in the folder, and the deletion of expired segments.
#
# Every worker stores the bounds that it was started with, so that they hold while no worker runs: readers and the
# command ``capture sweep`` delete what has expired since.

RETENTION_FILE = "retention.json"
REWRITE_SUFFIX = ".rewrite"
"""Suffix of the file that replaces a segment after a deletion. A crash leaves it behind."""
PARTIAL_SUFFIX = f"{SUFFIX}.partial"
"""Suffix of a segment that is fetched from a worker. A crash leaves it behind."""
_LEFT_OVER_SECONDS = 3600.0
"""Age at which files of these two suffixes are certainly left over from a crash."""
PARTS = 16
"""A segment is closed at this fraction of either bound, so a sweep never deletes more than that at once."""
MAX_OPEN_SECONDS = 300.0
"""Age at which a segment is closed at the latest. Only closed segments can be pulled for distillation."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Bounds of a folder of segments: the age of records in seconds and the size of all segments in bytes."""

    max_age_seconds: float
    max_bytes: int

    @property
    def segment_bytes(self) -> int:
        """Size at which a segment is closed."""
        return self.max_bytes // PARTS

    @property
    def segment_seconds(self) -> float:
        """Age at which a segment is closed."""
        return min(self.max_age_seconds / PARTS, MAX_OPEN_SECONDS)

    def is_expired(self, segment: Segment, now: float) -> bool:
        """Return whether the oldest record of a segment is about to exceed its age."""
        return segment.began_seconds < now - self.max_age_seconds + self.segment_seconds


def store_retention(folder: Path, retention: Retention) -> None:
    """Write the bounds to the folder, in place of those of a worker that started before. Raise OSError on failure."""
    _write_small(folder / RETENTION_FILE, json.dumps(asdict(retention)) + "\n")


def open_private(path: str, flags: int) -> int:
    """Open a file that only this user can read, if it is created: an ``opener`` of `open`."""
    return os.open(path, flags, 0o600)


def _write_small(path: Path, text: str) -> None:
    """Write or replace a file that only this user can read, whole or not at all, to stay. Raise OSError on failure."""
    partial = path.with_name(f".{uuid.uuid4().hex}")
    try:
        with open(partial, "x", opener=open_private) as file:
            file.write(text)
        flush(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def stored_retention(folder: Path) -> Retention | None:
    """Return the bounds of the worker that started last in this folder, or None if they are not known."""
    try:
        stored = json.loads((folder / RETENTION_FILE).read_bytes())
        return Retention(float(stored["max_age_seconds"]), int(stored["max_bytes"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def sweep(folder: Path, retention: Retention, now: float) -> int:
    """Delete segments beyond the bounds of age and size, oldest first, and return how many.

    Raises:
        OSError: A segment cannot be deleted.
    """
    segments = list_segments(folder)
    total_bytes = sum(segment.size for segment in segments)
    # Leave room for the records that all workers write until their next sweep.
    bound = retention.max_bytes - retention.segment_bytes
    deleted = 0
    for segment in segments:
        if retention.is_expired(segment, now) or total_bytes > bound:
            delete_segment(segment.path)
            total_bytes -= segment.size
            deleted += 1
    _delete_leftovers(folder, now)
    return deleted


def delete_segment(path: Path) -> None:
    """Delete a segment, with the copy of its records that a killed deletion left. Raise OSError if it stays."""
    path.unlink(missing_ok=True)
    path.with_suffix(REWRITE_SUFFIX).unlink(missing_ok=True)


def delete_expired(folder: Path, max_age_seconds: float, now: float) -> int:
    """Delete the segments whose records exceed the age, and return how many. Raise OSError if one cannot be deleted."""
    return sweep(folder, Retention(max_age_seconds, sys.maxsize), now)


def _delete_leftovers(folder: Path, now: float) -> None:
    for path in (*folder.glob(f"*{REWRITE_SUFFIX}"), *folder.glob(f"*{PARTIAL_SUFFIX}")):
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_mtime < now - _LEFT_OVER_SECONDS:
                path.unlink()


# Keyed hashes of users, and the keys by which the records of a user are found again.
#
# The key is derived from the admin token with the scope operator, so that it is the same in all workers of a
# deployment. A key is stored in the folder before the first record that needs it, and stays there until those records
# have expired. A rotated token therefore prevents no deletion. Tokens cannot be computed from stored keys.

KEY_SUFFIX = ".subject-key"
_KEY_BYTES = 32
_ID_DIGITS = 8
_PURPOSE = b"specdecode captured users"
_MARGIN_SECONDS = 86400.0
"""Time for which a key outlives the records: no request takes longer."""


def derived_key(token: str) -> bytes:
    """Return the key of a token."""
    return hmac.digest(token.encode(), _PURPOSE, hashlib.sha256)


def key_id(key: bytes) -> str:
    """Return the identifier of a key, which precedes every hash that was made with it."""
    return hashlib.sha256(key).hexdigest()[:_ID_DIGITS]


def keyed_hash(key: bytes, user: str) -> str:
    """Return the identifier of the key and 32 hex digits of the HMAC-SHA256 of a user's identifier."""
    return f"{key_id(key)}-{hmac.digest(key, user.encode(errors='surrogatepass'), hashlib.sha256).hex()[:32]}"


def stored_keys(folder: Path) -> dict[str, bytes]:
    """Return the keys of a folder by their identifiers. Files that hold none are left out."""
    keys = {}
    for path in folder.glob(f"*{KEY_SUFFIX}"):
        with contextlib.suppress(OSError, ValueError):
            key = bytes.fromhex(path.read_text())
            if key_id(key) == path.name.removesuffix(KEY_SUFFIX):
                keys[key_id(key)] = key
    return keys


class UserHashes:
    """Hashes that records of one user may have."""

    def __init__(self, user: str, keys: Iterable[bytes]) -> None:
        known = list(keys)
        self.hashes = {keyed_hash(key, user) for key in known}
        self._ids = {key_id(key) for key in known}

    def matches(self, stored: str) -> bool:
        """Return whether a record with the hash ``stored`` is of this user."""
        return stored in self.hashes

    def is_undecidable(self, stored: str) -> bool:
        """Return whether a hash was made with a key that is not known. The record may be of this user."""
        return bool(stored) and stored.partition("-")[0] not in self._ids


class SubjectKeys:
    """Key of one worker's folder. Without a token the key is random.

    ``hash_of`` may be called from the event loop; the other methods block.
    """

    def __init__(self, folder: Path, read_token: Callable[[], str | None] = lambda: None) -> None:
        self._folder, self._read_token = folder, read_token
        token = read_token()
        self._key = derived_key(token) if token else secrets.token_bytes(_KEY_BYTES)
        self._used: dict[str, bytes] = {key_id(self._key): self._key}

    def hash_of(self, user: str | None) -> str:
        """Return the hash of a user; empty without one."""
        return keyed_hash(self._key, user) if user else ""

    def refresh(self) -> None:
        """Use the key of the current token, if the token was replaced."""
        token = self._read_token()
        if token and (key := derived_key(token)) != self._key:
            self._used[key_id(key)] = key
            self._key = key

    def store_for(self, stored_hash: str) -> None:
        """Store the key of a hash in the folder before a record with this hash is written. Raise OSError.

        Several workers may write the same one, and the folder may be emptied by hand.
        """
        identifier = stored_hash.partition("-")[0]
        path = self._folder / f"{identifier}{KEY_SUFFIX}"
        if identifier in self._used and not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_small(path, self._used[identifier].hex())

    def known(self) -> Mapping[str, bytes]:
        """Return the keys of this worker and those of the folder, by identifier."""
        return {**stored_keys(self._folder), **self._used}

    def expire(self, max_age_seconds: float) -> None:
        """Delete keys that no stored record can need any more, and keep the current one."""
        current = self._folder / f"{key_id(self._key)}{KEY_SUFFIX}"
        with contextlib.suppress(OSError):
            os.utime(current)
        for path in self._folder.glob(f"*{KEY_SUFFIX}"):
            with contextlib.suppress(OSError):
                if path != current and path.stat().st_mtime < time.time() - max_age_seconds - _MARGIN_SECONDS:
                    path.unlink()


# Deletion of single records from a segment file, while its writer may append to it.


@dataclass(slots=True)
class DeletionCounts:
    """Result of a deletion."""

    records: int = 0
    """Stored records that were deleted."""
    queued: int = 0
    """Records of the user that waited to be written."""
    segments: int = 0
    """Segments that were rewritten or deleted."""
    unreadable: int = 0
    """Segments and frames that cannot be read, which may hold records of the user until they expire."""
    undecidable: int = 0
    """Records whose hash was made with a key that is not known. They may be of the user."""


def delete_records(path: Path, is_unwanted: Callable[[bytes], bool], counts: DeletionCounts) -> bool:
    """Delete the records for whose encoded bodies ``is_unwanted`` holds from one segment, and count them.

    The segment is replaced by one without them, of the same name, owner and mode, or deleted if none remain. A
    truncated end is dropped, because it may hold such a record.

    Returns:
        False if the file is no segment. It stays as it is.

    Raises:
        OSError: The segment cannot be read or replaced.
    """
    while True:
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return True
        with file, locked(file.fileno()):
            if os.fstat(file.fileno()).st_nlink:
                return _delete_from(file, path, is_unwanted, counts)


def _delete_from(file: BinaryIO, path: Path, is_unwanted: Callable[[bytes], bool], counts: DeletionCounts) -> bool:
    if file.read(len(MAGIC)) != MAGIC:
        return False
    file.seek(0)
    kept: set[int] = set()
    deleted, is_torn = 0, False
    for index, body in enumerate(read_bodies(file)):
        if body is None:
            is_torn = True
        elif is_unwanted(body):
            deleted += 1
        else:
            kept.add(index)
    if not deleted and not is_torn:
        return True
    if kept:
        file.seek(0)
        bodies = enumerate(read_bodies(file))
        _replace(path, file, (frame_of(body) for index, body in bodies if body is not None and index in kept))
    else:
        delete_segment(path)
    counts.records += deleted
    counts.segments += 1
    return True


def _replace(path: Path, replaced: BinaryIO, frames: Iterable[bytes]) -> None:
    """Replace an open segment by one with these frames, of the same owner and mode."""
    status = os.fstat(replaced.fileno())
    other = path.with_suffix(REWRITE_SUFFIX)
    try:
        with open(other, "wb", opener=open_private) as file:
            os.fchmod(file.fileno(), status.st_mode & 0o777)
            with contextlib.suppress(PermissionError):
                os.fchown(file.fileno(), status.st_uid, status.st_gid)
            file.write(MAGIC)
            file.writelines(frames)
        flush(other)
        other.replace(path)
    except OSError:
        other.unlink(missing_ok=True)
        raise


# Writer of segment files: crash-safe, shared by several workers, bounded in bytes and age.
#
# Every worker writes its own segments and deletes the oldest segments of all workers, so that the bounds hold for the
# folder. A writer starts another segment if its current one was deleted or rewritten. A write that fails, as on a full
# disk, leaves only whole frames behind.

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TRIES = 3
"""Segments to try for one record. A fresh segment is gone only if the folder is emptied at that moment."""


class SegmentWriter:
    """Writer of one worker's segments.

    ``clock`` returns Unix seconds. Raises FolderUnusable if the folder cannot be written. A full disk is no error: the
    writer works once there is space.
    """

    def __init__(self, folder: Path, retention: Retention, clock: Callable[[], float] = time.time) -> None:
        self._folder, self.retention, self._clock = folder, retention, clock
        self._retention_stored = False
        self._file: int | None = None
        self.path = folder
        """Segment of the last record."""
        self._size, self._began, self._unswept = 0, 0.0, 0
        self.sweeps = 0
        """Sweeps so far. After each, older segments may be gone."""
        try:
            self._prepare_folder()
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise FolderUnusable(f"{folder} cannot be written: {error.strerror}") from None
            log.warning("%s has no space left; requests are captured once there is some", folder)

    @property
    def largest(self) -> int:
        """Size in bytes of the largest record that fits a segment."""
        return self.retention.segment_bytes - len(MAGIC) - FRAME_OVERHEAD

    @property
    def open_path(self) -> Path | None:
        """Segment that the next record may be appended to; None if the next record begins another one."""
        return self.path if self._file is not None else None

    @property
    def sweep_seconds(self) -> float:
        """Interval between sweeps in seconds, at which no record exceeds its age by more than a fraction."""
        return min(60.0, self.retention.segment_seconds)

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
        if self._unswept > self.retention.segment_bytes // PARTS:
            self._try_to_sweep()

    def sweep(self) -> None:
        """Delete segments beyond the bounds of age and size, oldest first. Raise OSError if one cannot be deleted."""
        self._unswept = 0
        self.sweeps += 1
        sweep(self._folder, self.retention, self._clock())

    def close(self) -> None:
        """Flush the current segment to disk and close it."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.fsync(file)
            with contextlib.suppress(OSError):  # of a network file system; the file is closed nevertheless
                os.close(file)

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
        too_old = self._clock() - self._began > self.retention.segment_seconds
        too_large = self._size + more > self.retention.segment_bytes
        return too_old or too_large or os.fstat(self._file).st_nlink == 0

    def _new_segment(self) -> int:
        """Create a segment with its head and open it. Nothing is left of a segment whose head cannot be written."""
        self._prepare_folder()
        self._began = self._clock()
        self.path = self._folder / segment_name(self._began)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            _write_whole(file, MAGIC)
        except OSError:
            os.close(file)
            self.path.unlink(missing_ok=True)
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
            self.close()  # nothing may follow an incomplete frame
        if is_empty:
            self.close()
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)

    def _try_to_sweep(self) -> None:
        """Sweep; the periodic sweep reports a failure, which must not lose the record that was written."""
        with contextlib.suppress(OSError):
            self.sweep()

    def _prepare_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (self._retention_stored and (self._folder / RETENTION_FILE).exists()):  # it may be emptied by hand
            store_retention(self._folder, self.retention)
            self._retention_stored = True


def _write_whole(file: int, content: bytes) -> None:
    """Write ``content`` in one call. Raise OSError if it was not written as a whole."""
    written = os.write(file, content)
    if written != len(content):
        raise OSError(errno.ENOSPC, f"only {written} of {len(content)} bytes could be written")


# Reader of the records in segment files. Workers may write to the folders at the same time.


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


# Listing of the finished segments of a folder, as a worker sends it for distillation.

SEGMENT_NAME = r"^[0-9]{18}-[0-9a-f]{12}\.segment$"
MAX_SEGMENT_BYTES = 2**31
MAX_LISTED = 4096
"""Segments of a listing, the newest: 14 days of segments of 5 minutes each."""
READ_BYTES = 256 * 1024
"""Bytes read at once, which bound the memory of hashing and of a transfer."""


class ListedSegment(Received):
    """One finished segment."""

    name: str = Field(pattern=SEGMENT_NAME)
    size: int = Field(ge=0, le=MAX_SEGMENT_BYTES)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class SegmentListing(Received):
    """The finished segments of a worker's folder, oldest first, and the maximum age of their records."""

    segments: tuple[ListedSegment, ...] = Field(default=(), max_length=MAX_LISTED)
    max_age_seconds: float = Field(gt=0, allow_inf_nan=False)


# Deletion of one user's records from a folder of segments, while workers may write to it.


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

    def is_of_user(body: bytes) -> bool:
        try:
            stored = decode_stamp(body).user
        except msgspec.MsgspecError:
            counts.unreadable += 1
            return False
        counts.undecidable += hashes.is_undecidable(stored)
        return hashes.matches(stored)

    try:
        for partial in folder.glob(f"*{PARTIAL_SUFFIX}"):  # of a pull that was killed
            partial.unlink()
        for segment in list_segments(folder):
            is_segment = delete_records(segment.path, is_of_user, counts)
            counts.unreadable += not is_segment
        flush(folder)
    except OSError as error:
        raise FolderUnusable(f"{error.filename or folder} cannot be rewritten: {error.strerror or error}") from None
    return counts
