"""Pure rules of one client connection: its phase, and when the server closes it.

    ARRIVING -> SERVING -> IDLE -> ARRIVING ...

A connection is ARRIVING from its start, or from the first byte of a later request, until the last byte of the body.
The caller passes the time, in seconds of one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from specdecode_worker.contract import ServerConfig

MAX_HEADER_BYTES = 64 * 1024
"""Limit of request line and headers together, the same as in h11."""
_FRAMING_FACTOR = 8
"""Bytes of chunked framing allowed for each byte of a body; a chunk of one byte has five."""
_EARLY_FACTOR = 0.95
"""Share of a time-out after which a half-open connection is closed.

The rest is for the interval of the checks and for a busy event loop, so that none is open longer than the time-out.
"""
KEEP_ALIVE_SECONDS = 75
"""Longest idle time of a connection.

It is longer than the connection pools of clients keep idle connections: the client then closes an idle connection
first, and no request is sent on a connection that the server has just closed.
"""


class Phase(Enum):
    """Phase of a connection."""

    ARRIVING = auto()
    SERVING = auto()
    IDLE = auto()


class Cut(Enum):
    """Reason why the server closes a connection; the value is the text of the log line."""

    HEADERS_LATE = "the headers did not arrive in time"
    BODY_LATE = "the body did not arrive in time"
    IDLE = "it was idle"
    UNREAD = "the client does not read its answer"
    DISPLACED = "it was the oldest of too many connections without a request"


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time-outs of a connection in seconds."""

    header_seconds: float
    body_seconds: float
    write_seconds: float
    idle_seconds: float = KEEP_ALIVE_SECONDS

    @classmethod
    def from_config(cls, config: ServerConfig) -> TimeLimits:
        """Return the time-outs of the configuration."""
        return cls(
            _EARLY_FACTOR * config.header_timeout_seconds,
            _EARLY_FACTOR * config.body_timeout_seconds,
            config.write_timeout_seconds,
        )


class ConnectionState:
    """State of one connection that decides when it is closed."""

    __slots__ = ("_body_bytes", "_framing_bytes", "_stalled_since", "_unsent_bytes", "begun", "has_headers", "paused",
                 "phase", "since")  # fmt: skip

    def __init__(self, now: float) -> None:
        self.phase = Phase.ARRIVING
        self.since = now
        """Time at which the phase began; for ARRIVING the start of the connection or the request's first byte."""
        self.begun = False
        """True once the first byte of the current request has arrived."""
        self.has_headers = False
        self.paused = False
        """True while the transport has more unsent output than its high-water mark."""
        self._framing_bytes = self._body_bytes = 0
        self._unsent_bytes = 0
        self._stalled_since: float | None = None

    def begin_request(self, now: float) -> None:
        """Record the first byte of a request. The first request counts from the start of the connection."""
        if self.phase is not Phase.ARRIVING or self.begun:
            self.since = now
        self.phase, self.begun, self.has_headers = Phase.ARRIVING, True, False
        self._framing_bytes = self._body_bytes = 0

    def queue_request(self) -> None:
        """Record that the request must wait for an earlier one of its connection. It has no deadline meanwhile."""
        self.phase = Phase.SERVING

    def start_queued_request(self, now: float) -> None:
        """Record that the rest of a queued request is read from now on."""
        self.phase, self.since = Phase.ARRIVING, now

    def complete_request(self, now: float, *, answered: bool) -> None:
        """Record the last byte of a request; ``answered`` is true if the response was sent before that."""
        self.phase, self.since = (Phase.IDLE if answered else Phase.SERVING), now

    def complete_response(self, now: float) -> None:
        """Record that the whole response is written. A request that is still arriving keeps its deadline."""
        if self.phase is Phase.SERVING:
            self.phase, self.since = Phase.IDLE, now
        if self._stalled_since is not None:
            self._stalled_since = now

    def count_received(self, received: int, body: int) -> None:
        """Count bytes of the current request: all that arrived, and those of them that belong to its body."""
        self._body_bytes += body
        self._framing_bytes += received - body

    @property
    def has_too_much_framing(self) -> bool:
        """True if headers, trailers and chunk framing exceed their limit."""
        return self._framing_bytes > MAX_HEADER_BYTES + _FRAMING_FACTOR * self._body_bytes

    def pause_writing(self, now: float) -> None:
        """Record that the unsent output exceeds the high-water mark."""
        self.paused, self._stalled_since = True, now

    def resume_writing(self, now: float) -> None:
        """Record that the client has read most of the unsent output."""
        self.paused, self._stalled_since = False, now

    def observe_unsent(self, unsent_bytes: int, now: float) -> None:
        """Record the size of the unsent output.

        A shrinking output is progress while a response is written. A paused connection must shrink to the low-water
        mark, and the rest of a complete response to nothing, so that a client cannot read a byte at a time for ever.
        """
        is_progress = self.phase is Phase.SERVING and not self.paused and unsent_bytes < self._unsent_bytes
        if not unsent_bytes:
            self._stalled_since = None
        elif self._stalled_since is None or is_progress:
            self._stalled_since = now
        self._unsent_bytes = unsent_bytes

    def overdue(self, now: float, limits: TimeLimits) -> Cut | None:
        """Return the reason to close the connection at time ``now``, or None."""
        if self._stalled_since is not None and now - self._stalled_since > limits.write_seconds:
            return Cut.UNREAD
        seconds = now - self.since
        match self.phase:
            case Phase.ARRIVING if not self.has_headers and seconds > limits.header_seconds:
                return Cut.HEADERS_LATE
            case Phase.ARRIVING if seconds > limits.body_seconds:
                return Cut.BODY_LATE
            case Phase.IDLE if seconds > limits.idle_seconds:
                return Cut.IDLE
            case _:
                return None
