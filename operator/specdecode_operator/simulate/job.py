"""One simulated request, what a worker may hold, and what a worker is really like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdecode_operator.simulate.steptimes import StepTable
from specdecode_operator.simulate.walks import Records


@dataclass(slots=True)
class Job:
    """One request on its way. ``todo`` of its ``context`` must be prefilled still; after a preemption all of it."""

    id: int
    arrived: float
    label: int
    kind: int
    prompt: int
    output: int
    root: int
    context: int = 0
    todo: int = 0
    left: int = 0
    accepted: int = 0
    drafts: int = 0
    queued: float = 0.0
    first: float | None = None
    done: float | None = None
    tries: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    kv_tokens: int = 65536


@dataclass(frozen=True, slots=True)
class Truth:
    """What a worker is really like."""

    table: StepTable
    records: Records
    quality: Callable[[int, float], float]
    """By kind and time."""
    factor: Callable[[float], float]
    """Of this pod's step times, by time."""
    context_edges: tuple[int, ...] = (1024, 8192)
