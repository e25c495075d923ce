"""Work queue of deployments: one run per key at a time, back-off per key, periodic resync.

``Schedule`` has the rules, with the time as an argument; ``WorkQueue`` runs them on the event loop. Events may add a
key any number of times: additions during a run, or close together, become one more run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from specdecode_operator.periods import offset_of
from specdecode_operator.times import back_off
from specdecode_operator.types import Key

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTimes:
    """Times of the schedule, in seconds."""

    debounce: float = 0.2
    """Least time from the end of a run to the start of the next run of the same key."""
    head_start: float = 30.0
    """Priority of events over resyncs: an event goes before resyncs that are late by less than this."""
    change_head_start: float = 600.0
    """Priority of changes by users, which go before other events too."""
    first_retry: float = 1.0
    """First back-off after a failure; it doubles with each further failure."""
    last_retry: float = 60.0
    """Longest back-off."""

    def retry(self, failures: int) -> float:
        """Return the back-off after this number of failures in a row."""
        return back_off(failures, first=self.first_retry, most=self.last_retry)


@dataclass(slots=True)
class Schedule:
    """Due times of keys, and the choice of the next key to run."""

    times: QueueTimes = field(default_factory=QueueTimes)
    _due: dict[Key, float] = field(default_factory=dict)
    _asked: dict[Key, float] = field(default_factory=dict)
    """Head start of each key that is due for an event, rather than for a resync or a retry."""
    _running: set[Key] = field(default_factory=set)
    _failures: dict[Key, int] = field(default_factory=dict)
    """Failures in a row."""
    _ended: dict[Key, float] = field(default_factory=dict)
    """End of the last run."""

    def add(self, key: Key, now: float, *, changed: bool = False) -> None:
        """Make a key due now. ``changed`` gives it the head start of a change by a user."""
        earliest = max(now, self._ended.get(key, now) + self.times.debounce if key in self._ended else now)
        self._due[key] = min(earliest, self._due.get(key, earliest))
        head_start = self.times.change_head_start if changed else self.times.head_start
        self._asked[key] = max(head_start, self._asked.get(key, 0.0))

    def take(self, now: float) -> Key | None:
        """Return the key that has been due longest, with head starts, and mark it as running. None if no key is due."""
        ready = [
            (due - self._asked.get(key, 0.0), key)
            for key, due in self._due.items()
            if due <= now and key not in self._running
        ]
        if not ready:
            return None
        _, key = min(ready)
        del self._due[key]
        self._asked.pop(key, None)
        self._running.add(key)
        return key

    def done(self, key: Key, now: float, *, again_in: float | None) -> None:
        """End a successful run. ``again_in`` is the time until the next resync, in seconds; None removes the key."""
        self._ends(key, now)
        self._failures.pop(key, None)
        if again_in is not None:
            self._at(key, next_turn(key, again_in, now), now)
        elif key not in self._due:
            self._ended.pop(key, None)

    def failed(self, key: Key, now: float) -> float:
        """End a failed run and return its back-off. An event during the run shortens it to ``first_retry``."""
        self._ends(key, now)
        self._failures[key] = self._failures.get(key, 0) + 1
        wait = self.times.first_retry if key in self._due else self.times.retry(self._failures[key])
        self._due[key] = now + wait
        return wait

    def waiting(self, now: float) -> int:
        """Return the number of keys that are due and do not run."""
        return sum(due <= now and key not in self._running for key, due in self._due.items())

    def next_due(self) -> float | None:
        """Return the earliest due time of the keys that do not run."""
        waiting = [due for key, due in self._due.items() if key not in self._running]
        return min(waiting, default=None)

    def _ends(self, key: Key, now: float) -> None:
        self._running.discard(key)
        self._ended[key] = now

    def _at(self, key: Key, due: float, now: float) -> None:
        asked = self._due.get(key)
        self._due[key] = due if asked is None else min(due, max(asked, now + self.times.debounce))


def next_turn(key: Key, period: float, now: float) -> float:
    """Return the next resync time of a key: about one period from now, at an offset that depends on the key.

    Without the offset, all keys would be due at the same time after a start, and delay events once per period.
    """
    if period <= 0:
        return now
    place = offset_of(key, period)
    return place + period * math.ceil((now + period / 2 - place) / period)


Handle = Callable[[Key], Awaitable[float | None]]
"""Function that handles a key. It returns the seconds until the next resync, or None to remove the key."""


class WorkQueue:
    """Queue that runs a handler for each due key, at most ``concurrency`` at a time."""

    def __init__(
        self,
        handle: Handle,
        *,
        concurrency: int = 4,
        times: QueueTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handle = handle
        self._schedule = Schedule(times or QueueTimes())
        self._slots = asyncio.Semaphore(concurrency)
        self._clock = clock
        self._woken = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, key: Key, *, changed: bool = False) -> None:
        """Make a key due now. ``changed`` marks a change by a user, which goes before other events."""
        self._schedule.add(key, self._clock(), changed=changed)
        self._woken.set()

    def depth(self) -> int:
        """Return the number of keys that are due and do not run yet."""
        return self._schedule.waiting(self._clock())

    async def run(self) -> None:
        """Run handlers until cancelled. Cancellation cancels the running handlers too."""
        try:
            while True:
                await self._slots.acquire()
                key = await self._next()
                task = asyncio.create_task(self._one(key), name="/".join(key))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            for task in self._tasks:
                task.cancel()

    async def _next(self) -> Key:
        while (key := self._schedule.take(self._clock())) is None:
            self._woken.clear()
            due = self._schedule.next_due()
            # asyncio.wait_for of Python 3.11 loses a cancellation that arrives together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if due is None else max(0.0, due - self._clock())):
                    await self._woken.wait()
        return key

    async def _one(self, key: Key) -> None:
        try:
            again_in = await self._handle(key)
        except Exception as error:
            wait = self._schedule.failed(key, self._clock())
            log.warning("%s/%s: again in %.0f s after %s: %s", *key, wait, type(error).__name__, error)
        else:
            self._schedule.done(key, self._clock(), again_in=again_in)
        finally:
            self._slots.release()
            self._woken.set()
