"""Counters of the capture, exported by ``metrics``. Threads of the capture and the event loop write them."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Dropped(StrEnum):
    """Reason why a request selected for capture has no record."""

    queue_full = "queue_full"
    opted_out = "opted_out"
    not_repeatable = "not_repeatable"
    """Sampled by multi-round sampling. A replay cannot verify its text."""
    redacted = "redacted"
    redaction_error = "redaction_error"
    too_large = "too_large"
    write_error = "write_error"
    stopped = "stopped"
    """Capture is stopped by a problem, which the report names."""
    deleted = "deleted"
    """The plan's rules changed, or the user's records were deleted, before the record was written."""


@dataclass(slots=True)
class CaptureCounts:
    """Counters of one worker, monotonic except ``stored_bytes``.

    ``stored_bytes`` is the size of the folder at the last sweep or write.
    """

    records: Counter[str] = field(default_factory=Counter)
    """Records written, by task."""
    dropped: Counter[Dropped] = field(default_factory=Counter)
    stored_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def drop(self, reason: Dropped, count: int = 1) -> None:
        """Count dropped records."""
        if count:
            with self._lock:
                self.dropped[reason] += count
