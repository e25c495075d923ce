"""Counters of the capture, exported by ``metrics``.

The recorder's thread and the event loop both write them, each with keys of its own.
"""

from __future__ import annotations

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


@dataclass(slots=True)
class CaptureCounts:
    """Counters of one worker, monotonic except ``stored_bytes``.

    ``stored_bytes`` is the size of the folder at the last sweep.
    """

    records: Counter[str] = field(default_factory=Counter)
    """Records written, by task."""
    dropped: Counter[Dropped] = field(default_factory=Counter)
    stored_bytes: int = 0
