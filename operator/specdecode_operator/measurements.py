"""Records of what was measured: figures for status, capacity, and workers that differ from their peers. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Accepted tokens per drafted token, and tokens per step of a sequence with a draft, over all workers."""

    acceptance_rate: float
    accepted_length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFigures:
    """Measurements of one task over the window. A value is None while the task had too little traffic for it."""

    acceptance_rate: float | None = None
    """Accepted tokens per draft over the depth of the task's row."""
    accepted_length: float | None = None
    """Tokens per step of a sequence with a draft: 1 + accepted / drafts."""
    ttft_seconds: float | None = None
    """Mean time to the first token."""
    itl_seconds: float | None = None
    """Mean inter-token latency."""
    speedup: float | None = None
    """Time of plain decoding for the task's tokens, divided by the time taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Measurements over the window of the last minute. Status shows them at most every half minute, to limit writes."""

    running: float
    waiting: float
    tokens_per_second: float
    synthetic: bool
    """True if a worker has synthetic knobs on, so that its figures are not those of real traffic."""
    speed: Speed | None = None
    """None while too few drafts were verified."""
    speedup: float | None = None
    """Time of plain decoding divided by the time taken, over all steps. None while plain step times are unknown."""
    tasks: Mapping[str, TaskFigures] = field(default_factory=dict)
    saved_device_seconds: float | None = None
    """Running total of LearnedState.saved_device_seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Load that one worker can carry with the present mix of requests and the shapes that would be chosen for it."""

    rate: float
    """Requests per second."""
    sequences: float
    """Mean number of sequences that run at this rate."""
    step_seconds: float
    limited_by: Literal["slots", "itl", "ttft", "cache"]
    """First limit that a higher rate would exceed: slots for sequences, an objective (ITL, TTFT), or the KV cache."""
    attainable: bool = True
    """False if a single sequence misses an objective; then more workers do not help."""


@dataclass(frozen=True, slots=True)
class ScalingLimit:
    """Reason why the replicas do not follow demand."""

    reason: Literal["Unschedulable", "AtMaximum", "ObjectiveOutOfReach"]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnhealthyWorker:
    """Pod whose acceptance fell far below its peers and its own past, or whose steps take longer than theirs."""

    pod: str
    uid: str
    reason: Literal["AcceptanceCollapsed", "SlowSteps"]
    message: str
    since: float
    """Start of the difference, in seconds of the operator's clock."""
    acceptance: float | None = None
    """Present acceptance rate of the first drafted token."""
    usual: float | None = None
    """Earlier acceptance rate of the first drafted token, for the same tasks."""
    pace: float | None = None
    """Step time of the pod divided by that of its peers."""
