"""What the operator remembers of one deployment between two looks at it. Pure.

``LearnedState`` outlives the operator. The rest of ``Session`` (the last reading of every worker, a minute of
differences) lives in the process and is learnt anew after a restart.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from specdecode_operator.state.learned import LearnedState, TemplateState
from specdecode_operator.telemetry.deltas import Delta
from specdecode_worker.contract import Report

WINDOW_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Baseline:
    """The last reading of one worker, packed: thousands are kept, and each is looked at once a poll."""

    packed: bytes
    clock_seconds: float
    tag: str = ""
    """Of the answer that brought it, as HTTP's ETag; empty where the worker gives none."""

    @classmethod
    def of(cls, report: Report, tag: str = "") -> Baseline:
        return cls(zlib.compress(report.model_dump_json().encode(), 1), report.clock_seconds, tag)

    @property
    def report(self) -> Report:
        found = _unpacked(self.packed)
        if found.clock_seconds == self.clock_seconds:
            return found
        return found.model_copy(update={"clock_seconds": self.clock_seconds})

    def at(self, clock_seconds: float) -> Baseline:
        """The same reading, later."""
        return replace(self, clock_seconds=clock_seconds)


@lru_cache(maxsize=64)
def _unpacked(packed: bytes) -> Report:
    """A look reads one several times, and many are looked at together."""
    return Report.model_validate_json(zlib.decompress(packed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A ready worker that sends no report: since when, and how many looks in a row."""

    since: float
    looks: int
    problem: str
    """Of the first look: later ones may differ in every number, and status is written on change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """All loads were looked at and no row moved; none will, while nothing changes that rows are chosen by."""

    basis: bytes
    """Digest of that."""
    since: float
    until: float
    """When the next wait is over, operator's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Everything remembered."""

    learned: LearnedState = field(default_factory=LearnedState)
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    """Last reading by pod uid."""
    window: tuple[Delta, ...] = ()
    """The fleet's differences of the last minute, oldest first."""
    silent: Mapping[str, Silence] = field(default_factory=dict)
    """By uid of the pod."""
    published_at: float = 0
    """When figures were last handed to status."""
    standing: Standing | None = None
    found: bool = True
    """False when no state was stored: it may be new, or somebody deleted the ConfigMap."""


@dataclass(frozen=True, slots=True)
class PackedSession:
    """A memory between two looks, nine tenths of it packed: a thousand are kept, and one is looked at once a poll.

    Estimates, rows and differences are hundreds of small objects, each with its names and its numbers.
    """

    packed: bytes
    template: bytes
    window: bytes
    rest: Session
    """All else."""

    @classmethod
    def of(cls, memory: Session) -> PackedSession:
        template = memory.learned.template
        return cls(
            zlib.compress(memory.learned.model_dump_json(by_alias=True).encode(), 1),
            zlib.compress(template.model_dump_json().encode(), 1) if template else b"",
            zlib.compress(pickle.dumps(memory.window), 1),
            replace(memory, learned=_NOTHING, window=()),
        )

    @property
    def memory(self) -> Session:
        learned = LearnedState.model_validate_json(zlib.decompress(self.packed))
        if self.template:
            template = TemplateState.model_validate_json(zlib.decompress(self.template))
            learned = learned.model_copy(update={"template": template})
        return replace(self.rest, learned=learned, window=pickle.loads(zlib.decompress(self.window)))


_NOTHING = LearnedState()
