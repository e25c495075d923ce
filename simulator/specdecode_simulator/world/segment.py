"""Messages between a modelled worker and its choice of shapes. Steps come in segments of one kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from specdecode_simulator.records.acceptance_walks import Form

Array = Any


class Group(NamedTuple):
    """Equal running requests: index of their task's label, context bucket, index of their kind."""

    label: int
    context: int
    kind: int


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's batch before a segment. ``groups`` counts its requests."""

    now: float
    worker: int
    sequences: int
    groups: Mapping[Group, int]
    kv_tokens: float
    prefill: bool = False
    """Prompts are due in the same steps: nothing is explored."""

    @property
    def context(self) -> int:
        """The longest context bucket in the batch."""
        return max(group.context for group in self.groups)


@dataclass(frozen=True, slots=True)
class Segment:
    """Choice for the next steps: a shape per group, and a largest number of steps."""

    forms: Mapping[Group, Form]
    most_steps: int = 127
    drafted_depth: int = 0
    """Depth that is drafted but not all verified: a shadow, or a budget known only after drafting. 0 adds nothing."""
    shadow: bool = False
    in_burst: bool = False
    dropped: int = 0
    """Steps that warm up and do not enter the cost cells."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a segment, summed over its steps. ``runs`` has the sums of `Walk` per group."""

    steps: int
    seconds: float
    sequences: float
    """Mean running requests: those that ended on the way count in part."""
    emitted: float
    runs: Mapping[Group, Array]
    prefill: bool = False


class Pilot(Protocol):
    """Picks shapes for one worker."""

    def next(self, load: Load) -> Segment: ...

    def measured(self, load: Load, segment: Segment, outcome: Outcome) -> None: ...


@runtime_checkable
class Calibrates(Protocol):
    """A pilot whose engine times steps before it serves."""

    def calibration(self, most: int) -> Iterable[tuple[int, Form]]:
        """(sequences, at most ``most``; shape) of such steps."""
