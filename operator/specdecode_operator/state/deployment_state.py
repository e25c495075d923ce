"""The one place where the three loops meet: an immutable state for each deployment, and the table of all of them.

Every field has one writer. The watch of our kind writes ``resource``; the telemetry loop writes ``readings``; the
planner writes ``session`` and ``decision``; the reconciler writes ``published``. Readers take the whole state and never
see half of a change, because all loops run on one event loop and replace it in one assignment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specdecode_operator.state.session import PackedSession
from specdecode_operator.types import Decision, Key
from specdecode_worker.contract import Plan, Report


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReading:
    """Result of asking one worker for its report."""

    at: float
    """Time of the attempt, in seconds since the epoch."""
    report: Report | None = None
    tag: str = ""
    """ETag of the report, sent with the next request so that an unchanged report need not be sent again."""
    problem: str | None = None
    """Reason why there is no report."""


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
class DeploymentState:
    """Everything that the operator knows of one deployment."""

    resource: Mapping[str, Any]
    """The SpecDecodeDeployment as the API server has it."""
    readings: Readings = Readings()
    session: PackedSession | None = None
    """Learned and measured state. None until it was loaded from the ConfigMap."""
    decision: Decision | None = None
    """Latest decision. None until the first one."""
    decided_generation: int = 0
    """Generation of the spec that ``decision`` is for."""
    published: Plan | None = None
    """Plan that is persisted and may be pushed to workers."""


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
