"""Control thread of the capture: applies rules, deletes, sweeps, and replaces writers that end or hang."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from specdecode_worker.capture.counters import CaptureCounts, Dropped
from specdecode_worker.capture.errors import CaptureError
from specdecode_worker.capture.live.live_store import LiveStore
from specdecode_worker.capture.live.record_writer import RecordWriter
from specdecode_worker.capture.live.rules_state import CurrentRules, RulesState
from specdecode_worker.capture.record import Record
from specdecode_worker.capture.record_queue import QueuedRecord, RecordQueue
from specdecode_worker.capture.retention import Retention
from specdecode_worker.capture.subject_keys import SubjectKeys
from specdecode_worker.contract.capture import CaptureRules

MAX_HUNG_WRITERS = 4
"""Most threads that may hang in redaction hooks. No further one is started."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Times of the capture in seconds."""

    retry: float = 60.0
    """Time after a failure until capture is tried again."""
    hang: float = 10.0
    """Time after which a redaction hook counts as hung, and a disk as not answering."""
    tick: float = 1.0
    """Interval at which the control thread looks at the writer."""
    lock: float = 10.0
    """Time that a deletion by user waits for a disk that does not answer."""


class ControlThread:
    """Thread that brings folder and writer in line with ``current``. No failure of capture ends it."""

    def __init__(
        self,
        current: CurrentRules,
        store: LiveStore,
        queue: RecordQueue,
        subjects: SubjectKeys,
        counts: CaptureCounts,
        limits: Limits,
    ) -> None:
        self.is_stopped = False
        """True while a problem stops capture. No record is queued then."""
        self._current, self._store, self._queue = current, store, queue
        self._subjects, self._counts, self._limits = subjects, counts, limits
        self._cleared_epoch = 0
        self._applied: CaptureRules | None = None
        self._tried: CaptureRules | None = None
        self._writer: RecordWriter | None = None
        self._stopped_writers: list[RecordWriter] = []
        self._problem = ""
        self._until_written = False
        self._retry_at = self._swept_at = 0.0
        self._busy_since: float | None = None
        self._closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capture control", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Let the thread apply new rules now."""
        self._wake.set()

    @property
    def problem(self) -> str:
        """Reason why requests are not captured; empty if there is none."""
        if self._problem:
            return self._problem
        writer, busy_since = self._writer, self._busy_since
        activity, seconds = (writer.activity() if writer else None) or ("", 0.0)
        if activity == "disk" and seconds > self._limits.hang:
            return f"{self._store.folder} has not answered for {seconds:.0f} s"
        if busy_since is not None and (seconds := time.monotonic() - busy_since) > self._limits.hang:
            return f"{self._store.folder} has been read and cleared for {seconds:.0f} s"
        return ""

    def close(self, seconds: float) -> None:
        """Write the queued records and end the threads, waiting at most ``seconds``."""
        end = time.monotonic() + seconds
        self._closing = True
        self._wake.set()
        self._thread.join(seconds)
        if self._writer is not None:
            self._writer.finish(max(end - time.monotonic(), 0))

    def _run(self) -> None:
        while True:
            self._wake.clear()
            if self._closing:
                return
            self._busy_since = time.monotonic()
            try:
                self._converge()
            except Exception as error:
                if not isinstance(error, OSError | CaptureError):
                    log.exception("capture control")
                self._fail(f"{self._store.folder}: {getattr(error, 'strerror', None) or error}")
            self._busy_since = None
            state = self._current.state
            is_idle = state.rules is None and state.epoch == self._cleared_epoch
            self._wake.wait(None if is_idle else self._limits.tick)

    def _converge(self) -> None:
        """Bring folder and writer in line with the rules. Raises OSError and CaptureError."""
        state = self._current.state
        if state.epoch != self._cleared_epoch:
            self._clear(state)
        if state.rules is None:
            return
        if state.rules is not self._applied and (state.rules is not self._tried or self._may_retry()):
            self._tried, self._retry_at = state.rules, 0.0
            self._prepare(state.rules)
        if state.rules is self._applied:
            self._check_writer(state.rules)
            self._sweep(state.rules)

    def _may_retry(self) -> bool:
        return time.monotonic() >= self._retry_at

    def _clear(self, state: RulesState) -> None:
        """Delete everything of earlier epochs."""
        self._stop_writer()
        with self._store.lock:
            self._queue.discard(lambda item: item.epoch != state.epoch)
            self._store.clear()
            self._subjects.forget_stored()
        self._cleared_epoch = state.epoch
        self._applied = self._tried = None
        self._problem, self._until_written, self.is_stopped = "", False, False
        self._counts.stored_bytes = 0

    def _prepare(self, rules: CaptureRules) -> None:
        """Open the folder with the bounds of the rules, and delete the records that they forbid."""
        with self._store.lock:
            state = self._current.state
            gone = self._queue.discard(lambda item: state.forbids(item.record, item.epoch))
            self._counts.drop(Dropped.deleted, gone)
            self._store.open(Retention(rules.max_age_seconds, rules.max_bytes))
            self._store.delete_forbidden(rules.delete_before, only_permitted=rules.consent == "OptIn")
        self._applied = rules
        self._swept_at = time.monotonic()
        self._counts.stored_bytes = self._store.totals.size

    def _check_writer(self, rules: CaptureRules) -> None:
        """Start the writer of the rules' hook. Replace one that has ended or hangs, after the time of a retry."""
        self._stopped_writers = [one for one in self._stopped_writers if one.is_alive]
        if self._writer is not None and self._writer.redact != rules.redact:
            self._stop_writer()
        if self._writer is not None:
            self._assess(self._writer)
        if self._writer is None and self._may_retry() and not self._is_held_up(rules.redact):
            self._writer = RecordWriter(rules.redact, self._queue, self._counts, self._write, self.wake)
            self.is_stopped = False
            self._writer.start()

    def _assess(self, writer: RecordWriter) -> None:
        activity, seconds = writer.activity() or ("", 0.0)
        if not writer.is_alive:
            self._writer = None
            if not writer.stopped:
                self._fail(writer.failure or "the capture thread ended", until_written=writer.disk_failed)
        elif activity == "redaction" and seconds > self._limits.hang:
            self._stop_writer()
            self._fail(f"the redaction hook {writer.redact} has not returned for {seconds:.0f} s")
        elif writer.is_ready and self._may_retry():
            self.is_stopped = False
            if not self._until_written:
                self._problem = ""

    def _stop_writer(self) -> None:
        """Stop the writer without waiting for it: it may hang in a hook."""
        if self._writer is not None:
            self._writer.stop()
            self._stopped_writers.append(self._writer)
            self._writer = None

    def _is_held_up(self, redact: str | None) -> bool:
        """Return whether a stopped writer with the same hook has not ended, or too many have not."""
        stopped = self._stopped_writers
        return len(stopped) >= MAX_HUNG_WRITERS or any(one.redact == redact for one in stopped)

    def _fail(self, problem: str, *, until_written: bool = False) -> None:
        """Stop capture until the rules change or the time of a retry has passed."""
        if problem != self._problem:
            log.warning("requests are not captured: %s", problem)
        self._problem, self._until_written = problem, until_written
        self.is_stopped = True
        self._retry_at = time.monotonic() + self._limits.retry
        self._counts.drop(Dropped.stopped, self._queue.discard(lambda _: True))

    def _sweep(self, rules: CaptureRules) -> None:
        if time.monotonic() < self._swept_at + self._store.sweep_seconds:
            return
        self._swept_at = time.monotonic()
        self._subjects.refresh()
        self._store.sweep()
        self._subjects.expire(rules.max_age_seconds)
        self._counts.stored_bytes = self._store.totals.size

    def _write(self, writer: RecordWriter, item: QueuedRecord, redacted: tuple[Record, bytes] | Dropped) -> bool:
        """Store a record unless the rules forbid it by now. Return False if it needs another hook. Raises OSError."""
        with self._store.lock:
            if item.unwanted:
                return True  # counted where it was discarded
            state = self._current.state
            if state.forbids(item.record, item.epoch):
                self._counts.drop(Dropped.deleted)
                return True
            is_current = state.rules is not None and state.rules.redact == writer.redact
            if not is_current or writer.stopped or state.epoch != self._cleared_epoch:
                return False
            if isinstance(redacted, Dropped):
                self._counts.drop(redacted)
                return True
            record, body = redacted
            if len(body) > self._store.largest:
                self._counts.drop(Dropped.too_large)
                return True
            self._subjects.store_for(record.user)
            self._store.append(record, body)
        self._counts.records[record.task] += 1
        self._counts.stored_bytes = self._store.totals.size
        if self._until_written:
            self._problem, self._until_written = "", False
        return True
