"""What workers did between two readings: differences of their counters. Pure; read by planning, scaling and status.

A report's counters only rise within one boot, so any two readings can be subtracted; a new ``boot_id`` makes the
later reading a baseline of its own and costs one poll of that worker, never the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specdecode_operator.telemetry.counters import (
    CellKey,
    Hits,
    Key,
    Moments,
    RequestSums,
    Sum,
    TaskSums,
    TrafficSums,
    merged,
    summed,
)
from specdecode_worker.contract import Buckets, Report, StepCell


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one worker, or the fleet, did between two polls."""

    at: float = 0
    """When the later reading was taken, operator's clock."""
    draft: str = ""
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    plain_steps: int = 0
    output_tokens: int = 0
    running: float = 0
    """Mean running requests: request-seconds per second, summed over workers."""
    waiting: float = 0
    seconds: float = 0
    """Workers' clock, averaged over workers."""
    acceptance: Mapping[tuple[str, int], Hits] = field(default_factory=dict)
    """By (task, depth), along the main path."""
    siblings: Mapping[tuple[str, int], Hits] = field(default_factory=dict)
    """The same where the path to the parent passed a sibling."""
    traffic: Mapping[str, TrafficSums] = field(default_factory=dict)
    requests: Mapping[str, RequestSums] = field(default_factory=dict)
    tasks: Mapping[str, TaskSums] = field(default_factory=dict)
    """Decoding steps and latencies by task."""
    steps: Mapping[CellKey, Moments] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Whether nobody asked for anything and nothing was tried meanwhile."""
        traffic = any(any(sums) for sums in self.traffic.values())
        return not (self.steps or self.drafts or self.plain_steps or self.output_tokens or self.running or traffic)

    def taking(self, factor: float) -> Delta:
        """The same, had every step taken ``factor`` times as long."""
        return replace(self, steps={key: moments.taking(factor) for key, moments in self.steps.items()})

    def without_acceptance(self) -> Delta:
        """Load and cost alone."""
        return replace(self, acceptance={}, siblings={}, requests={})


def difference(before: Report, after: Report, *, at: float, buckets: Buckets) -> Delta | None:
    """What the worker did in between; None when the two cannot be subtracted (a new boot, a clock that stood still).

    Steps are left out when the worker counts them in other context buckets than ``buckets``: after a change of the
    plan's edges its cells mean something else.
    """
    seconds = after.clock_seconds - before.clock_seconds
    if before.boot_id != after.boot_id or seconds <= 0 or went_backwards(before, after):
        return None
    same_buckets = after.plan.buckets.context == before.plan.buckets.context == buckets.context
    return Delta(
        at=at,
        draft=after.draft.hash,
        drafts=after.drafts - before.drafts,
        draft_tokens=after.draft_tokens - before.draft_tokens,
        accepted_tokens=after.accepted_tokens - before.accepted_tokens,
        plain_steps=after.plain_steps - before.plain_steps,
        output_tokens=_output(after) - _output(before),
        running=(after.running_request_seconds - before.running_request_seconds) / seconds,
        waiting=(after.waiting_request_seconds - before.waiting_request_seconds) / seconds,
        seconds=seconds,
        acceptance=_acceptance(before, after, "main"),
        siblings=_acceptance(before, after, "sibling"),
        traffic=_difference(_traffic(before), _traffic(after)),
        requests=_requests(before, after),
        tasks=_difference(_tasks(before), _tasks(after)),
        steps=_steps(before, after) if same_buckets else {},
    )


def went_backwards(before: Report, after: Report) -> str | None:
    """The first counter that fell within one boot, or None."""
    names = ("clock_seconds", "drafts", "draft_tokens", "accepted_tokens", "plain_steps", "running_request_seconds")
    return next((name for name in names if getattr(after, name) < getattr(before, name)), None)


def fleet(deltas: Iterable[Delta], *, at: float, draft: str) -> Delta:
    """One poll of all workers as one Delta. What was done with another draft than ``draft`` counts as load alone."""
    found = list(deltas)
    if not found:
        return Delta(at=at, draft=draft)
    return replace(
        _added([delta for delta in found if delta.draft == draft]),
        at=at,
        draft=draft,
        output_tokens=sum(delta.output_tokens for delta in found),
        traffic=merged(delta.traffic for delta in found),
        tasks=merged(delta.tasks for delta in found),
        running=sum(delta.running for delta in found),
        waiting=sum(delta.waiting for delta in found),
        seconds=sum(delta.seconds for delta in found) / len(found),
    )


def over(window: Iterable[Delta]) -> Delta:
    """Polls one after the other as one Delta; running and waiting become means over the window's time."""
    found = list(window)
    seconds = sum(delta.seconds for delta in found)
    return replace(
        _added(found),
        running=sum(delta.running * delta.seconds for delta in found) / seconds if seconds else 0,
        waiting=sum(delta.waiting * delta.seconds for delta in found) / seconds if seconds else 0,
        seconds=seconds,
    )


def _added(found: Sequence[Delta]) -> Delta:
    """Counts and sums of all of them; the draft is the last one's that names any."""
    return Delta(
        at=max((delta.at for delta in found), default=0),
        draft=next((delta.draft for delta in reversed(found) if delta.draft), ""),
        drafts=sum(delta.drafts for delta in found),
        draft_tokens=sum(delta.draft_tokens for delta in found),
        accepted_tokens=sum(delta.accepted_tokens for delta in found),
        plain_steps=sum(delta.plain_steps for delta in found),
        output_tokens=sum(delta.output_tokens for delta in found),
        acceptance=merged(delta.acceptance for delta in found),
        siblings=merged(delta.siblings for delta in found),
        traffic=merged(delta.traffic for delta in found),
        requests=merged(delta.requests for delta in found),
        tasks=merged(delta.tasks for delta in found),
        steps=merged(delta.steps for delta in found),
    )


def _output(report: Report) -> int:
    return sum(cell.output_tokens for cell in report.traffic)


def _acceptance(before: Report, after: Report, parent: str) -> dict[tuple[str, int], Hits]:
    """Greedy and sampled together: the mix that was measured is the mix that is planned for."""
    drafts = _loaded(after)
    return _difference(_hits(before, drafts, parent), _hits(after, drafts, parent))


def _loaded(report: Report) -> set[str]:
    """Hashes of the drafts that run. A task uses one of them; counters of others stand still."""
    return {report.draft.hash, *(draft.hash for draft in report.named_drafts)}


def _hits(report: Report, drafts: set[str], parent: str) -> dict[tuple[str, int], Hits]:
    return summed(
        ((cell.task, cell.depth), Hits(cell.ranks[0], cell.total, tuple(map(float, cell.ranks[1:-1]))))
        for cell in report.acceptance
        if cell.draft in drafts and cell.parent == parent
    )


def _traffic(report: Report) -> dict[str, TrafficSums]:
    return summed(
        (
            cell.task,
            TrafficSums(cell.arrivals, cell.finished, cell.prompt_tokens, cell.cached_tokens, cell.output_tokens),
        )
        for cell in report.traffic
    )


def _tasks(report: Report) -> dict[str, TaskSums]:
    return summed((cell.task, TaskSums.of_cell(cell)) for cell in report.tasks)


def _requests(before: Report, after: Report) -> dict[str, RequestSums]:
    drafts = _loaded(after)
    return _difference(_by_task(before, drafts), _by_task(after, drafts))


def _by_task(report: Report, drafts: set[str]) -> dict[str, RequestSums]:
    return summed(
        (cell.task, RequestSums(cell.n, cell.a, cell.d, cell.aa, cell.ad, cell.dd))
        for cell in report.requests
        if cell.draft in drafts
    )


def _steps(before: Report, after: Report) -> dict[CellKey, Moments]:
    """Between two polls a worker runs few of the kinds of steps that it has ever run: the others are not looked at."""
    known = [(CellKey.of(cell), cell) for cell in before.steps]
    cells = [(CellKey.of(cell), cell) for cell in after.steps]
    counts = {key: cell.count for key, cell in known}
    moved = {key for key, cell in cells if counts.get(key) != cell.count}
    found = _difference(_cells(known, moved), _cells(cells, moved))
    return {key: moments for key, moments in found.items() if moments.count > 0}


def _cells(cells: Iterable[tuple[CellKey, StepCell]], keys: Collection[CellKey]) -> dict[CellKey, Moments]:
    return summed((key, Moments.of_cell(cell)) for key, cell in cells if key in keys)


def _difference(before: Mapping[Key, Sum], after: Mapping[Key, Sum]) -> dict[Key, Sum]:
    """What ``after`` has more than ``before``; a cell that the worker dropped in between counts from zero, and one
    that fell says nothing."""
    found = {key: value.minus(before[key]) if key in before else value for key, value in after.items()}
    return {key: value for key, value in found.items() if _has_risen(value)}


def _has_risen(value: Hits | RequestSums | TrafficSums | Moments | TaskSums) -> bool:
    if isinstance(value, Moments):
        return min(value.count, value.seconds, value.seconds_squared, value.emitted) >= 0
    if isinstance(value, Hits):
        return min(value.hits, value.total - value.hits, *value.ranks, 0.0) >= 0
    return min(value) >= 0
