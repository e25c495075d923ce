"""Sums of counters with their arithmetic: moments of steps, hits of drafts, traffic and requests. Pure.

All estimates are made of these sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from operator import add, sub
from typing import NamedTuple, Protocol, Self, TypeVar

from specdecode_worker.contract import FEATURES, StepCell, TaskCell

K = len(FEATURES)
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
