"""Retention of captured records: the maximum age, stored in the folder, and the deletion of expired segments.

Every worker stores the bounds that it was started with, so that they hold while no worker runs: readers and the command
``capture sweep`` delete what has expired since.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from specdecode_worker.capture.segment_format import Segment, list_segments

RETENTION_FILE = "retention.json"
REWRITE_SUFFIX = ".rewrite"
"""Suffix of the file that replaces a segment after a deletion. A crash leaves it behind."""
_REWRITE_SECONDS = 3600.0
"""Age at which such a file is certainly left over from a crash."""
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
    partial = folder / f".{uuid.uuid4().hex}"
    try:
        partial.write_text(json.dumps(asdict(retention)) + "\n")
        partial.replace(folder / RETENTION_FILE)
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
    """Delete segments beyond the bounds of age and size, oldest first, and return the remaining bytes.

    Raises:
        OSError: A segment cannot be deleted.
    """
    segments = list_segments(folder)
    total_bytes = sum(segment.size for segment in segments)
    # Leave room for the records that all workers write until their next sweep.
    bound = retention.max_bytes - retention.segment_bytes
    for segment in segments:
        if retention.is_expired(segment, now) or total_bytes > bound:
            segment.path.unlink(missing_ok=True)
            total_bytes -= segment.size
    _delete_leftovers(folder, now)
    return total_bytes


def delete_expired(folder: Path, max_age_seconds: float, now: float) -> int:
    """Delete the segments whose records exceed the age, and return how many.

    Raises:
        OSError: A segment cannot be deleted.
    """
    retention = Retention(max_age_seconds, 0)
    expired = [segment for segment in list_segments(folder) if retention.is_expired(segment, now)]
    for segment in expired:
        segment.path.unlink(missing_ok=True)
    _delete_leftovers(folder, now)
    return len(expired)


def _delete_leftovers(folder: Path, now: float) -> None:
    for path in folder.glob(f"*{REWRITE_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_mtime < now - _REWRITE_SECONDS:
                path.unlink()
