"""Session of one deployment: its learned state, and recent measurements that a restart may lose. Pure.

``LearnedState`` survives a restart of the operator. The rest of ``Session`` (the last report of each worker, the
measurements of the last minute) is lost with the process and collected again.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from specdecode_operator.state.draft_record import UNUSED, DraftRecord
from specdecode_operator.state.learned import LearnedState
from specdecode_operator.telemetry.counters import Delta
from specdecode_worker.contract import Report

WINDOW_SECONDS = 60.0
"""Length of the window of measurements, in seconds. The figures in status cover this window."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Last report of one worker, with which the next one is compared. It is compressed, because there are thousands."""

    packed: bytes
    """Compressed JSON of the report."""
    clock_seconds: float
    """Worker's clock at the report; it replaces that of the packed one."""
    tag: str = ""
    """ETag of the response; empty if the worker sent none."""

    @classmethod
    def of(cls, report: Report, tag: str = "") -> Baseline:
        baseline = cls(zlib.compress(report.model_dump_json().encode(), 3), report.clock_seconds, tag)
        _reports.put(baseline.packed, report)
        return baseline

    @property
    def report(self) -> Report:
        """The report, with the time of ``clock_seconds``."""
        report = _reports.get(self.packed)
        if report.clock_seconds == self.clock_seconds:
            return report
        return report.model_copy(update={"clock_seconds": self.clock_seconds})

    def at(self, clock_seconds: float) -> Baseline:
        """Return the same report at a later time of the worker's clock."""
        return replace(self, clock_seconds=clock_seconds)


class _ReportCache:
    """The reports that were read last, unpacked: between a poll and its decision and status each is read several times.

    A report takes some 150 KiB when it is unpacked, so there are few.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._reports: OrderedDict[bytes, Report] = OrderedDict()

    def get(self, packed: bytes) -> Report:
        report = self._reports.get(packed)
        if report is None:
            report = Report.model_validate_json(zlib.decompress(packed))
        self.put(packed, report)
        return report

    def put(self, packed: bytes, report: Report) -> None:
        self._reports[packed] = report
        self._reports.move_to_end(packed)
        while len(self._reports) > self._size:
            self._reports.popitem(last=False)


_reports = _ReportCache(size=24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Period in which a ready worker sends no report."""

    since: float
    """Start, in seconds of the operator's clock."""
    looks: int
    """Consecutive rounds without a report."""
    problem: str
    """Problem of the first of these rounds. It is not updated, so that status stays the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Learned state of one deployment, and its recent measurements."""

    learned: LearnedState = field(default_factory=LearnedState)
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    """Last report of each worker, by uid of the pod."""
    window: tuple[Delta, ...] = ()
    """Differences between reports, summed over all workers, of the last WINDOW_SECONDS; oldest first."""
    round: int = 0
    """Number of the last telemetry round that was counted."""
    silent: Mapping[str, Silence] = field(default_factory=dict)
    """Ready workers without a report, by uid of the pod."""
    published_at: float = 0
    """Time when figures were last published to status, in seconds of the operator's clock."""
    drafts: DraftRecord = UNUSED
    """Rollout of drafts, which survives a restart as ``learned`` does."""
    stored: bool = True
    """False if no state was stored: the deployment is new, or the ConfigMap of its state was deleted or unreadable."""
