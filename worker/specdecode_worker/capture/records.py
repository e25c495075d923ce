"""Captured requests: their record, its redaction, and the queue to the thread that writes it."""

from __future__ import annotations

import hashlib
import logging
import pkgutil
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from specdecode_worker.sampling.params import Sampling

log = logging.getLogger(__name__)

# Errors of capture.
#
# CaptureError
# ├── HookNotFound       the redaction hook cannot be imported
# ├── FolderUnusable     the folder of segments cannot be created, written or read
# ├── SegmentNotFound    a folder has no finished segment of a name
# └── CapturePullFailed  no segments can be fetched from workers


class CaptureError(Exception):
    """Base of errors of capture. The message names the remedy."""


class HookNotFound(CaptureError):
    """The redaction hook cannot be imported."""


class FolderUnusable(CaptureError):
    """The folder of segments cannot be created, written or read."""


class SegmentNotFound(CaptureError):
    """A folder has no finished segment of a name."""


class CapturePullFailed(CaptureError):
    """No segments can be fetched from workers: no address, a wrong token or no space."""


# Counters of the capture, exported by ``metrics``. Threads of the capture and the event loop write them.


class Dropped(StrEnum):
    """Reason why a request selected for capture has no record."""

    queue_full = "queue_full"
    opted_out = "opted_out"
    not_repeatable = "not_repeatable"
    """Guided by a grammar, or sampled by multi-round sampling. A replay cannot verify its text."""
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


# Record of one served request: its token ids and sampling parameters, enough to replay it. It holds no text: requests
# with a grammar, which quotes the client's schemas, choices and words, have no record.
#
# On disk a record is a msgpack map by field name. Readers ignore unknown fields.


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One served request.

    ``tokens`` are the prompt followed by the output, which starts at index ``prompt_length``.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    sampling: Sampling
    """Sampling parameters with the seed, without a grammar and the log-probabilities that the client requested."""
    target: str
    """Hash of the target's weights."""
    task: str
    time_seconds: float
    """Unix time at which the output ended."""
    opening: str
    """`opening_hash` the conversation.

    All turns of a conversation share it, so that they are assigned to the same split.
    """
    share: float = 1.0
    """Share of such requests that were captured: this record represents 1/share of them."""
    user: str = ""
    """Hash of the request's field ``user`` (`SubjectKeys.hash_of`); empty without one. Records are deleted by it."""
    permitted: bool = False
    """True if the client expressly permitted the capture. Other records are deleted when consent becomes OptIn."""

    def __post_init__(self) -> None:
        if self.sampling.grammar:
            raise ValueError("a record holds no grammar")

    @property
    def output_length(self) -> int:
        """Number of output tokens."""
        return len(self.tokens) - self.prompt_length


def opening_hash(text: str) -> str:
    """Return 16 hex digits of the SHA-256 of the first user text.

    Differences in white space do not change it.
    """
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16]


class Stamp(msgspec.Struct, frozen=True):
    """Fields of a record by which it is deleted. Reading them is faster than decoding the record."""

    time_seconds: float
    user: str = ""
    permitted: bool = False


encode: Callable[[Record], bytes] = msgspec.msgpack.Encoder().encode
"""Function that returns the msgpack encoding of a record."""
decode: Callable[[bytes], Record] = msgspec.msgpack.Decoder(Record).decode
"""Function that decodes a record, and raises msgspec.DecodeError or its subclass ValidationError if it cannot."""
decode_stamp: Callable[[bytes], Stamp] = msgspec.msgpack.Decoder(Stamp).decode
"""Function that decodes the stamp of an encoded record, and raises msgspec.MsgspecError if it cannot."""


# Redaction hook: a function of the user that receives every record before it is written.

Hook = Callable[[Record], Record | None]


def load_hook(name: str) -> Hook:
    """Import the hook named ``module:function``.

    Raises:
        HookNotFound: the import fails or the result is not callable. The message contains the exception of the module.
    """
    try:
        function: Any = pkgutil.resolve_name(name)
    except Exception as error:  # a user's module may raise any exception
        raise HookNotFound(f"the redaction hook {name} cannot be imported: {type(error).__name__}: {error}") from None
    if not callable(function):
        raise HookNotFound(f"the redaction hook {name} is no function")
    hook: Hook = function
    return hook


def redact_and_encode(record: Record, hook: Hook | None) -> tuple[Record, bytes] | Dropped:
    """Return the record to write with its encoding, or the reason to drop it.

    A hook that fails or returns anything but a record drops the record, so that no unredacted record is written.
    """
    redacted: Any = record  # the hook is the user's and may return anything
    if hook is not None:
        try:
            redacted = hook(record)
        except Exception as error:  # of any type; its message is not logged, since it may contain the text to hide
            log.warning("the redaction hook raised %s; the record is dropped", type(error).__name__)
            return Dropped.redaction_error
    if redacted is None:
        return Dropped.redacted
    if not isinstance(redacted, Record):
        return Dropped.redaction_error
    try:
        return redacted, encode(redacted)
    except (TypeError, ValueError):  # the hook set a field to a type that a record cannot hold
        return Dropped.redaction_error


# Bounded queue between the event loop and the thread that writes records. Waiting records can be discarded.

QUEUE_RECORDS = 256


@dataclass(slots=True, eq=False)
class QueuedRecord:
    """Record that waits to be written. ``epoch`` is that of the recorder when the request began."""

    record: Record
    epoch: int = 0
    unwanted: bool = False
    """True if it was discarded after it had been taken. It must not be written."""


class RecordQueue:
    """Queue of records. No method waits for a thread that redacts or writes."""

    def __init__(self) -> None:
        self._waiting: deque[QueuedRecord] = deque()
        self._taken: set[QueuedRecord] = set()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: QueuedRecord) -> bool:
        """Queue a record. Return False if the queue is full."""
        with self._changed:
            if len(self._waiting) >= QUEUE_RECORDS:
                return False
            self._waiting.append(item)
            self._changed.notify()
            return True

    def take(self, may_take: Callable[[], bool]) -> QueuedRecord | None:
        """Wait for a record and return the oldest one. Return None if ``may_take`` is false, now or after a `wake`.

        The caller hands the record to `done` when it is written or dropped, or to `give_back`.
        """
        with self._changed:
            while may_take():
                if self._waiting:
                    item = self._waiting.popleft()
                    self._taken.add(item)
                    return item
                self._changed.wait()
            return None

    def done(self, item: QueuedRecord) -> None:
        """Forget a record that was taken."""
        with self._changed:
            self._taken.discard(item)

    def give_back(self, item: QueuedRecord) -> None:
        """Let another thread take a record that was taken, unless it was discarded meanwhile."""
        with self._changed:
            self._taken.discard(item)
            if not item.unwanted:
                self._waiting.appendleft(item)
                self._changed.notify()

    def discard(self, is_unwanted: Callable[[QueuedRecord], bool]) -> int:
        """Remove the records for which ``is_unwanted`` holds, mark those that are being written, and count both."""
        with self._changed:
            discarded = [item for item in (*self._waiting, *self._taken) if not item.unwanted and is_unwanted(item)]
            for item in discarded:
                item.unwanted = True
            self._waiting = deque(item for item in self._waiting if not item.unwanted)
        return len(discarded)

    def wake(self) -> None:
        """Let every call of `take` check its condition again."""
        with self._changed:
            self._changed.notify_all()
