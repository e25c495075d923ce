"""What capture counts; ``metrics`` shows it. Written by the recorder's thread and the event loop, each its own keys."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Dropped(StrEnum):
    """Why a request that was to be captured is not among the records."""

    queue_full = "queue_full"
    opted_out = "opted_out"
    not_repeatable = "not_repeatable"
    """Sampled by multi-round sampling, whose text no replay can check."""
    redacted = "redacted"
    redaction_error = "redaction_error"
    too_large = "too_large"
    write_error = "write_error"


@dataclass(slots=True)
class CaptureCounts:
    """Monotonic, but ``stored_bytes``: what the folder held when it was last looked at."""

    records: Counter[str] = field(default_factory=Counter)
    """By task."""
    dropped: Counter[Dropped] = field(default_factory=Counter)
    stored_bytes: int = 0
