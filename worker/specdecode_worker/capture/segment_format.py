"""Format of segment files of captured records.

A segment is MAGIC followed by frames. A frame is the length and the CRC-32 of its body (little-endian u32 each), then
the body. A truncated or corrupt frame ends its segment. The name of a segment starts with the time of its oldest record
in microseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

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
