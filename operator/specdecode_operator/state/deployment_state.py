"""The one place where the three loops meet: an immutable state for each deployment, and the table of all of them.

Every field has one writer. The watch of our kind writes ``resource``; the telemetry loop writes ``readings``; the
planner writes ``session``, ``decision`` and ``failure``; the reconciler writes ``published``. ``pending`` is handed
from the planner to the reconciler. Readers take the whole state and never see half of a change, because all loops run
on one event loop and replace it in one assignment.

Large values are packed: a thousand deployments of ten workers must fit into the memory of one small pod.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specdecode_operator.api.v1alpha1 import Decision as DecisionRecord
from specdecode_operator.state.packed import Packed
from specdecode_operator.state.session import Baseline, PackedSession
from specdecode_operator.types import Decision, Key
from specdecode_worker.contract import Plan, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReading:
    """Result of asking one worker for its report."""

    at: float
    """Time of the attempt, in seconds since the epoch."""
    baseline: Baseline | None = None
    """The report, packed. None if there is none."""
    problem: str | None = None
    """Reason why there is no report."""

    @classmethod
    def of(cls, report: Report, tag: str, at: float) -> WorkerReading:
        return cls(at=at, baseline=Baseline.of(report, tag))

    @property
    def report(self) -> Report | None:
        return self.baseline.report if self.baseline else None

    @property
    def tag(self) -> str:
        """ETag of the report, sent with the next request so that an unchanged report need not be sent again."""
        return self.baseline.tag if self.baseline else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Latest readings of one deployment's workers."""

    at: float = 0
    """End of the latest round, in seconds since the epoch."""
    round: int = 0
    """Number of rounds so far; a higher number means new readings."""
    by_uid: Mapping[str, WorkerReading] = field(default_factory=dict)
    """By uid of the pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Plans that are persisted and may be pushed to workers."""

    uid: str
    """uid of the deployment."""
    version: int
    plan: Packed[Plan]
    own: Mapping[str, Packed[Plan]] = field(default_factory=dict)
    """By address: plans of workers that do not run the common one and have not taken theirs yet."""
    excluded: frozenset[str] = frozenset()
    """Addresses of workers that do not run the common plan."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why there is no decision for the present spec."""

    generation: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Parts of decisions that the reconciler has not carried out yet; the planner adds to them, a reconcile clears."""

    urgent: bool = False
    """The state holds a decision that must be persisted before it takes effect."""
    learnt: bool = False
    """Something was measured, which is worth a write when one is due."""
    changes: tuple[DecisionRecord, ...] = ()
    """Decisions without an Event, oldest first."""

    def after(self, done: Pending, *, is_saved: bool) -> Pending:
        """Return what is left once ``done``, an earlier value, was carried out and its Events were written."""
        if self is done:
            return Pending(urgent=done.urgent and not is_saved)
        count = len(done.changes)
        return replace(self, changes=self.changes[count:]) if self.changes[:count] == done.changes else self


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentState:
    """Everything that the operator knows of one deployment."""

    resource: Packed[Mapping[str, Any]]
    """The SpecDecodeDeployment as the API server has it."""
    generation: int
    """Generation of ``resource``."""
    readings: Readings = Readings()
    session: PackedSession | None = None
    """Learned and measured state. None until it was loaded from the ConfigMap."""
    decision: Packed[Decision] | None = None
    """Latest decision. None until the first one."""
    decided: tuple[Any, ...] = ()
    """Identity of the resource that ``decision`` is for (generation)."""
    pending: Pending = Pending()
    failure: Failure | None = None
    published: Published | None = None


class StateTable:
    """States by the key of their deployment."""

    def __init__(self) -> None:
        self._states: dict[Key, DeploymentState] = {}

    def get(self, key: Key) -> DeploymentState | None:
        return self._states.get(key)

    def keys(self) -> tuple[Key, ...]:
        return tuple(self._states)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._states)

    def put(self, key: Key, state: DeploymentState) -> None:
        """Set the whole state, for a deployment that was seen for the first time."""
        self._states[key] = state

    def update(self, key: Key, **changes: Any) -> DeploymentState | None:
        """Replace fields of a state. Return the new state, or None if the deployment is gone."""
        known = self._states.get(key)
        if known is None:
            return None
        self._states[key] = state = replace(known, **changes)
        return state

    def remove(self, key: Key) -> None:
        self._states.pop(key, None)
