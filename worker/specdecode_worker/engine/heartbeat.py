"""Heartbeat of the engine process: a block of shared memory that the engine writes and the server reads.

The engine never waits to write it. The server can read it while the engine is stopped or hangs, which no message over
a socket allows. All times are readings of CLOCK_MONOTONIC, which both processes share.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from multiprocessing.sharedctypes import RawArray
from typing import NamedTuple

BEAT_SECONDS = 0.2
"""Interval of the beats of an idle engine. Readers may rely on 250 ms."""
_FACTS = struct.Struct("7d")
_VERSION_BYTES = 8
_READ_ATTEMPTS = 100


class Phase(IntEnum):
    """Activity of the engine process."""

    LOADING = 0
    WARMING_UP = 1
    CALIBRATING = 2
    IDLE = 3
    STEP = 4
    CAPTURING = 5
    SWAPPING = 6


class Heartbeat(NamedTuple):
    """Facts of the last beat. ``rows`` and ``prefill_tokens`` are those of the last launched step."""

    phase: Phase
    phase_began_seconds: float
    beat_seconds: float
    step: int
    """Number of the last step that began; 0 before the first step after the start."""
    rows: int
    prefill_tokens: int
    longest_step_seconds: float


class HeartbeatBlock:
    """Shared memory with one heartbeat. Pass it to the engine process as an argument of its start.

    A version number that is odd during a write protects readers from a heartbeat that is half old and half new.
    """

    def __init__(self) -> None:
        # Unlinked shared memory that a spawned child inherits; it leaves no file behind after a crash.
        self._fields: ctypes.Array[ctypes.c_double] = RawArray(ctypes.c_double, 8)
        self.write(Heartbeat(Phase.LOADING, time.monotonic(), time.monotonic(), 0, 0, 0, 0.0))

    def write(self, beat: Heartbeat) -> None:
        """Replace the heartbeat. There must be one writer at a time."""
        fields = self._fields
        fields[0] += 1
        _FACTS.pack_into(fields, _VERSION_BYTES, *beat)
        fields[0] += 1

    def read(self) -> Heartbeat:
        """Return the heartbeat. A writer that was stopped in the middle of a write does not block the reader."""
        values = list(self._fields)
        for _ in range(_READ_ATTEMPTS):
            version, values = self._fields[0], list(self._fields)
            if version % 2 == 0 and version == values[0] == self._fields[0]:
                break
        _, phase, phase_began, beat, step, rows, prefill_tokens, longest_step = values
        return Heartbeat(Phase(int(phase)), phase_began, beat, int(step), int(rows), int(prefill_tokens), longest_step)


class HeartbeatWriter:
    """Writer of the heartbeat in the engine process."""

    def __init__(self, block: HeartbeatBlock, clock: Callable[[], float] = time.monotonic) -> None:
        self._block, self._clock = block, clock
        self._phase, self._phase_began_seconds = Phase.LOADING, clock()
        self._step = self._rows = self._prefill_tokens = 0
        self._longest_step_seconds = 0.0
        self._write(self._phase_began_seconds)

    def enter(self, phase: Phase) -> None:
        """Begin a phase, or beat if it has begun already. The end of a step updates the longest step."""
        now = self._clock()
        if self._phase is Phase.STEP:
            self._longest_step_seconds = max(self._longest_step_seconds, now - self._phase_began_seconds)
        if phase is not self._phase or phase is Phase.STEP:
            self._phase, self._phase_began_seconds = phase, now
        if phase is Phase.STEP:
            self._step += 1
            self._rows = self._prefill_tokens = 0
        self._write(now)

    def record_launch(self, rows: int, prefill_tokens: int) -> None:
        """Beat with the size of the step that is launched now, in any phase."""
        self._rows, self._prefill_tokens = rows, prefill_tokens
        self._write(self._clock())

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Run a block in this phase and return to the previous one, whose time then begins again."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before if before is not Phase.STEP else Phase.IDLE)

    def _write(self, now: float) -> None:
        self._block.write(
            Heartbeat(
                self._phase,
                self._phase_began_seconds,
                now,
                self._step,
                self._rows,
                self._prefill_tokens,
                self._longest_step_seconds,
            )
        )
