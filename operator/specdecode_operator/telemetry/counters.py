"""Counters of reports: their sums, from which all estimates are made, and their differences between readings. Pure.

The counters of a report only rise within one boot, so that any two readings can be subtracted. After a restart of the
worker (a new ``boot_id``) the later reading is the new baseline; this costs one poll of that worker and none of others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from operator import add, sub
from typing import Literal, NamedTuple, Protocol, Self, TypeVar

from specdecode_worker.contract import FEATURES, AcceptanceCell, Buckets, Report, StepCell, TaskCell

K = len(FEATURES)
SEQUENCES, VERIFY_TOKENS = FEATURES.index("sequences"), FEATURES.index("verify_tokens")
"""Places of these features in x."""
PAIRS = tuple((row, column) for row in range(K) for column in range(row, K))
"""Positions (row, column) of the upper triangle of x x', row by row, in the order of ``StepCell.xx``."""


class Kind(Protocol):
    """Object that names a kind of step: a StepCell of a report, or a stored cell of the step time model."""

    @property
    def tokens_bucket(self) -> int: ...
    @property
    def draft_passes(self) -> int: ...
    @property
    def prefill(self) -> bool: ...
    @property
    def context_bucket(self) -> int: ...


class CellKey(NamedTuple):
    """Kind of step, by the fields of StepCell that name it."""

    tokens_bucket: int
    draft_passes: int
    prefill: bool
    context_bucket: int

    @classmethod
    def of(cls, cell: Kind) -> Self:
        """Return the kind of the steps of a cell."""
        return cls(cell.tokens_bucket, cell.draft_passes, cell.prefill, cell.context_bucket)


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over steps of one kind."""

    values: tuple[float, ...]
    """count, t, t^2, emitted tokens, then x (K), x t (K) and x x' (upper triangle). t is the step time in seconds."""

    @classmethod
    def of_cell(cls, cell: StepCell) -> Self:
        """Return the sums of a cell of a report."""
        return cls((cell.count, cell.t, cell.tt, cell.emitted, *cell.x, *cell.xt, *cell.xx))

    @property
    def count(self) -> float:
        return self.values[0]

    @property
    def weight(self) -> float:
        """Number of observations, by the name that all sums share."""
        return self.count

    @property
    def seconds(self) -> float:
        return self.values[1]

    @property
    def seconds_squared(self) -> float:
        return self.values[2]

    @property
    def emitted(self) -> float:
        return self.values[3]

    @property
    def x(self) -> tuple[float, ...]:
        return self.values[4 : 4 + K]

    @property
    def xt(self) -> tuple[float, ...]:
        return self.values[4 + K : 4 + 2 * K]

    @property
    def xx(self) -> tuple[float, ...]:
        return self.values[4 + 2 * K :]

    @property
    def mean_x(self) -> tuple[float, ...]:
        return tuple(value / self.count for value in self.x)

    def mean_of(self, feature: int) -> float:
        """Return the mean of one feature, by its index in FEATURES."""
        return self.values[4 + feature] / self.count

    @property
    def mean_seconds(self) -> float:
        return self.seconds / self.count

    @property
    def variance(self) -> float:
        """Variance of the step time, in seconds^2."""
        return max(0.0, self.seconds_squared / self.count - self.mean_seconds**2)

    def plus(self, other: Moments) -> Moments:
        return Moments(tuple(map(add, self.values, other.values)))

    def minus(self, other: Moments) -> Moments:
        return Moments(tuple(map(sub, self.values, other.values)))

    def times(self, factor: float) -> Moments:
        return Moments(tuple([value * factor for value in self.values]))

    def taking(self, factor: float) -> Moments:
        """Return the sums as they were if every step had taken ``factor`` times as long."""
        count, seconds, squared, emitted = self.values[:4]
        sums = (count, factor * seconds, factor**2 * squared, emitted)
        return Moments((*sums, *self.x, *(factor * value for value in self.xt), *self.xx))

    def with_emitted(self, tokens: float) -> Moments:
        """Return the sums with another number of emitted tokens."""
        return Moments((*self.values[:3], tokens, *self.values[4:]))


class Hits(NamedTuple):
    """Ranks of the target's token among the draft's candidates."""

    hits: float
    """Observations in which the draft's first candidate was the target's token."""
    total: float
    """All observations."""
    ranks: tuple[float, ...] = ()
    """Observations of ranks 1, 2, ...; trailing zeros may be left out."""

    @property
    def weight(self) -> float:
        """Number of observations, by the name that all sums share."""
        return self.total

    def plus(self, other: Hits) -> Hits:
        ranks = tuple(mine + theirs for mine, theirs in zip_longest(self.ranks, other.ranks, fillvalue=0.0))
        return Hits(self.hits + other.hits, self.total + other.total, ranks)

    def minus(self, other: Hits) -> Hits:
        ranks = tuple(mine - theirs for mine, theirs in zip_longest(self.ranks, other.ranks, fillvalue=0.0))
        return Hits(self.hits - other.hits, self.total - other.total, ranks)

    def times(self, factor: float) -> Hits:
        return Hits(self.hits * factor, self.total * factor, tuple(value * factor for value in self.ranks))


class TrafficSums(NamedTuple):
    """Requests and tokens that were received and completed."""

    arrivals: float
    finished: float
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float

    def plus(self, other: TrafficSums) -> TrafficSums:
        return TrafficSums(*map(add, self, other))

    def minus(self, other: TrafficSums) -> TrafficSums:
        return TrafficSums(*map(sub, self, other))

    def times(self, factor: float) -> TrafficSums:
        return TrafficSums(*(value * factor for value in self))


class RequestSums(NamedTuple):
    """Sums over ``n`` finished requests of their accepted tokens a, their drafts d, and the products of the two."""

    n: float
    a: float
    d: float
    aa: float
    ad: float
    dd: float

    def plus(self, other: RequestSums) -> RequestSums:
        return RequestSums(*map(add, self, other))

    def minus(self, other: RequestSums) -> RequestSums:
        return RequestSums(*map(sub, self, other))

    def times(self, factor: float) -> RequestSums:
        return RequestSums(*(value * factor for value in self))


class TaskSums(NamedTuple):
    """Decoding steps, their tokens, and counts and sums (seconds) of TTFT and ITL of one task."""

    decode_steps: float
    decode_tokens: float
    ttft_count: float
    ttft_seconds: float
    itl_count: float
    itl_seconds: float

    @classmethod
    def of_cell(cls, cell: TaskCell) -> Self:
        latencies = (sum(cell.ttft.counts), cell.ttft.sum, sum(cell.itl.counts), cell.itl.sum)
        return cls(cell.decode_steps, cell.decode_tokens, *latencies)

    def plus(self, other: TaskSums) -> TaskSums:
        return TaskSums(*map(add, self, other))

    def minus(self, other: TaskSums) -> TaskSums:
        return TaskSums(*map(sub, self, other))

    def times(self, factor: float) -> TaskSums:
        return TaskSums(*(value * factor for value in self))


NO_HITS = Hits(0, 0)
NO_REQUESTS = RequestSums(0, 0, 0, 0, 0, 0)
NO_TRAFFIC = TrafficSums(0, 0, 0, 0, 0)
NO_STEPS = TaskSums(0, 0, 0, 0, 0, 0)

Sum = TypeVar("Sum", Hits, RequestSums, TrafficSums, Moments, TaskSums)
Key = TypeVar("Key")


def merged(mappings: Iterable[Mapping[Key, Sum]]) -> dict[Key, Sum]:
    """Return the sums of all mappings, key by key."""
    return summed(pair for sums in mappings for pair in sums.items())


def summed(cells: Iterable[tuple[Key, Sum]]) -> dict[Key, Sum]:
    """Return the sum of all cells of each key."""
    sums: dict[Key, Sum] = {}
    for key, value in cells:
        sums[key] = sums[key].plus(value) if key in sums else value
    return sums


CreditKey = tuple[str, str, int, Literal["main", "sibling"]]
"""Task, hash of the draft, depth, and parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Counts of one worker, or of the fleet, between two polls."""

    at: float = 0
    """Time of the later reading on the operator's clock, in seconds since the epoch."""
    draft: str = ""
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    plain_steps: int = 0
    output_tokens: int = 0
    running: float = 0
    """Mean number of running requests (request-seconds per second), summed over workers."""
    waiting: float = 0
    """Mean number of waiting requests, summed over workers."""
    seconds: float = 0
    """Time between the readings on the workers' clocks, averaged over workers."""
    acceptance: Mapping[tuple[str, int], Hits] = field(default_factory=dict)
    """By (task, depth), at positions whose path to the root has rank 0 throughout."""
    siblings: Mapping[tuple[str, int], Hits] = field(default_factory=dict)
    """By (task, depth), at positions whose path to the root passes a sibling."""
    contexts: Mapping[tuple[str, int], Hits] = field(default_factory=dict)
    """First draft tokens by task and context bucket."""
    traffic: Mapping[str, TrafficSums] = field(default_factory=dict)
    requests: Mapping[str, RequestSums] = field(default_factory=dict)
    credit: Mapping[CreditKey, Hits] = field(default_factory=dict)
    """Acceptance of each draft on its own, of tasks that merge drafts."""
    tasks: Mapping[str, TaskSums] = field(default_factory=dict)
    """Decoding steps and latencies by task."""
    steps: Mapping[CellKey, Moments] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """True if there was neither a request nor a step."""
        traffic = any(any(sums) for sums in self.traffic.values())
        return not (self.steps or self.drafts or self.plain_steps or self.output_tokens or self.running or traffic)

    def taking(self, factor: float) -> Delta:
        """Return the delta as it were if every step had taken ``factor`` times as long."""
        return replace(self, steps={key: moments.taking(factor) for key, moments in self.steps.items()})

    def without_acceptance(self) -> Delta:
        """Return the delta with load and step times only."""
        return replace(self, acceptance={}, siblings={}, contexts={}, credit={}, requests={})

    def load_only(self) -> Delta:
        """Return the delta of a worker that runs two drafts in turns: its steps are those of no single draft."""
        return replace(self.without_acceptance(), draft="", steps={})


def difference(before: Report, after: Report, *, at: float, buckets: Buckets) -> Delta | None:
    """Return the counts of one worker between two readings.

    Return None if the readings cannot be subtracted: the worker restarted, its clock did not advance, or a counter
    fell. Steps are left out if the worker counts them in other context buckets than ``buckets``: after a change of the
    plan's edges its cells are not comparable.

    Args:
        before: Earlier reading.
        after: Later reading of the same worker.
        at: Time of the later reading on the operator's clock, in seconds since the epoch.
        buckets: Buckets of the present plan.
    """
    seconds = after.clock_seconds - before.clock_seconds
    if before.boot_id != after.boot_id or seconds <= 0 or went_backwards(before, after):
        return None
    # Counters of other drafts than those that run do not change.
    drafts = {after.draft.hash, *(draft.hash for draft in after.named_drafts)}
    output = _output(after) - _output(before)
    steps = after.drafts - before.drafts + after.plain_steps - before.plain_steps
    most = 2 * max(output, steps)  # of what a depth counts; twice, for drafts of before that are scored now
    same_buckets = after.plan.buckets.context == before.plan.buckets.context == buckets.context
    return Delta(
        at=at,
        draft=after.draft.hash,
        drafts=after.drafts - before.drafts,
        draft_tokens=after.draft_tokens - before.draft_tokens,
        accepted_tokens=after.accepted_tokens - before.accepted_tokens,
        plain_steps=after.plain_steps - before.plain_steps,
        output_tokens=output,
        running=(after.running_request_seconds - before.running_request_seconds) / seconds,
        waiting=(after.waiting_request_seconds - before.waiting_request_seconds) / seconds,
        seconds=seconds,
        acceptance=_hits_difference(_hits(before, drafts, "main"), _hits(after, drafts, "main"), most),
        siblings=_hits_difference(_hits(before, drafts, "sibling"), _hits(after, drafts, "sibling"), most),
        credit=_hits_difference(_credit(before, drafts), _credit(after, drafts), most),
        contexts=_hits_difference(_contexts(before, drafts), _contexts(after, drafts), most) if same_buckets else {},
        traffic=_difference(_traffic(before), _traffic(after)),
        requests=_difference(_requests(before, drafts), _requests(after, drafts)),
        tasks=_difference(_tasks(before), _tasks(after)),
        steps=_steps(before, after) if same_buckets else {},
    )


class Totals(NamedTuple):
    """Counters of a report that never fall within one boot, apart from those of its cells."""

    boot_id: str
    clock_seconds: float
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    plain_steps: int
    running_request_seconds: float

    @classmethod
    def of(cls, report: Report) -> Totals:
        return cls(*(getattr(report, name) for name in cls._fields))


def went_backwards(before: Report | Totals, after: Report) -> str | None:
    """Return the name of the first counter that fell, or None. The readings must be of the same boot."""
    return next((name for name in Totals._fields[1:] if getattr(after, name) < getattr(before, name)), None)


def regression(before: Report | Totals | None, after: Report) -> str | None:
    """Return why ``after`` cannot be believed: a counter fell within one boot, which counters never do.

    ``before`` stays the baseline until all counters have passed it or the worker starts again.
    """
    if before is None or before.boot_id != after.boot_id:
        return None
    name = went_backwards(before, after)
    if name is None:
        return None
    return f"{name}: fell from {getattr(before, name):g} to {getattr(after, name):g} within one boot"


def fleet(deltas: Iterable[Delta], *, at: float, draft: str) -> Delta:
    """Return one poll of all workers as one Delta.

    Workers with another draft than ``draft`` add to the load only. Those without any add their steps too, which are
    plain ones: of a deployment that uses no draft any more, nothing else would be known.
    """
    polled = list(deltas)
    if not polled:
        return Delta(at=at, draft=draft)
    return replace(
        _added([delta for delta in polled if delta.draft == draft or (not delta.draft and delta.steps)]),
        at=at,
        draft=draft,
        output_tokens=sum(delta.output_tokens for delta in polled),
        traffic=merged(delta.traffic for delta in polled),
        tasks=merged(delta.tasks for delta in polled),
        running=sum(delta.running for delta in polled),
        waiting=sum(delta.waiting for delta in polled),
        seconds=sum(delta.seconds for delta in polled) / len(polled),
    )


def over(window: Iterable[Delta]) -> Delta:
    """Return consecutive polls as one Delta. Running and waiting requests become means over the time of the window."""
    polls = list(window)
    seconds = sum(delta.seconds for delta in polls)
    return replace(
        _added(polls),
        running=sum(delta.running * delta.seconds for delta in polls) / seconds if seconds else 0,
        waiting=sum(delta.waiting * delta.seconds for delta in polls) / seconds if seconds else 0,
        seconds=seconds,
    )


def _added(deltas: Sequence[Delta]) -> Delta:
    """Return the sums of all counts. The draft is that of the last delta that names one."""
    return Delta(
        at=max((delta.at for delta in deltas), default=0),
        draft=next((delta.draft for delta in reversed(deltas) if delta.draft), ""),
        drafts=sum(delta.drafts for delta in deltas),
        draft_tokens=sum(delta.draft_tokens for delta in deltas),
        accepted_tokens=sum(delta.accepted_tokens for delta in deltas),
        plain_steps=sum(delta.plain_steps for delta in deltas),
        output_tokens=sum(delta.output_tokens for delta in deltas),
        acceptance=merged(delta.acceptance for delta in deltas),
        siblings=merged(delta.siblings for delta in deltas),
        contexts=merged(delta.contexts for delta in deltas),
        credit=merged(delta.credit for delta in deltas),
        traffic=merged(delta.traffic for delta in deltas),
        requests=merged(delta.requests for delta in deltas),
        tasks=merged(delta.tasks for delta in deltas),
        steps=merged(delta.steps for delta in deltas),
    )


def _output(report: Report) -> int:
    return sum(cell.output_tokens for cell in report.traffic)


def _hits(report: Report, drafts: set[str], parent: str) -> dict[tuple[str, int], Hits]:
    """Return acceptance counts. Greedy and sampled tokens are added: a plan is made for the mix that was measured."""
    return summed(
        ((cell.task, cell.depth), _hits_of(cell))
        for cell in report.acceptance
        if cell.draft in drafts and cell.parent == parent
    )


def _credit(report: Report, drafts: set[str]) -> dict[CreditKey, Hits]:
    return summed(
        ((cell.task, cell.draft, cell.depth, cell.parent), _hits_of(cell))
        for cell in report.credit
        if cell.draft in drafts
    )


def _contexts(report: Report, drafts: set[str]) -> dict[tuple[str, int], Hits]:
    return summed(
        ((cell.task, cell.context), Hits(cell.hits, cell.total)) for cell in report.contexts if cell.draft in drafts
    )


def _hits_of(cell: AcceptanceCell) -> Hits:
    return Hits(cell.ranks[0], cell.total, tuple(map(float, cell.ranks[1:-1])))


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


def _requests(report: Report, drafts: set[str]) -> dict[str, RequestSums]:
    return summed(
        (cell.task, RequestSums(cell.n, cell.a, cell.d, cell.aa, cell.ad, cell.dd))
        for cell in report.requests
        if cell.draft in drafts
    )


def _steps(before: Report, after: Report) -> dict[CellKey, Moments]:
    """Return the difference of step cells.

    Between two polls a worker runs few of all kinds of steps, so that cells with the same count are skipped. A cell
    whose steps took longer than the time between was left out of ``before``, whose size is limited, and is skipped too.
    """
    earlier = [(CellKey.of(cell), cell) for cell in before.steps]
    later = [(CellKey.of(cell), cell) for cell in after.steps]
    counts = {key: cell.count for key, cell in earlier}
    most_seconds = 1.01 * (after.clock_seconds - before.clock_seconds)  # of sums that were rounded
    changed = {
        key
        for key, cell in later
        if (counts[key] != cell.count if key in counts else cell.wall_seconds <= most_seconds)
    }
    differences = _difference(_cells(earlier, changed), _cells(later, changed))
    return {key: moments for key, moments in differences.items() if moments.count > 0}


def _cells(cells: Iterable[tuple[CellKey, StepCell]], keys: Collection[CellKey]) -> dict[CellKey, Moments]:
    return summed((key, Moments.of_cell(cell)) for key, cell in cells if key in keys)


def _difference(before: Mapping[Key, Sum], after: Mapping[Key, Sum]) -> dict[Key, Sum]:
    """Return ``after`` minus ``before``, key by key.

    A cell that is not in ``before`` counts from zero. A cell that fell is left out.
    """
    differences = {key: value.minus(before[key]) if key in before else value for key, value in after.items()}
    return {key: value for key, value in differences.items() if _has_risen(value)}


def _hits_difference(before: Mapping[Key, Hits], after: Mapping[Key, Hits], most: float) -> dict[Key, Hits]:
    """Return the difference of cells of acceptance, each of which counts a step once.

    A cell that rose by more than ``most`` was left out of ``before``, whose size is limited, and is skipped.
    """
    return {key: hits for key, hits in _difference(before, after).items() if hits.total <= most}


def _has_risen(value: Hits | RequestSums | TrafficSums | Moments | TaskSums) -> bool:
    if isinstance(value, Moments):
        return min(value.count, value.seconds, value.seconds_squared, value.emitted) >= 0
    if isinstance(value, Hits):
        return min(value.hits, value.total - value.hits, *value.ranks, 0.0) >= 0
    return min(value) >= 0
