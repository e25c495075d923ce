"""A simulated request, and the limits of a worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Job:
    """Request in a simulated worker.

    ``todo`` tokens of its ``context`` are still to be prefilled; after a preemption these are all of them.
    """

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
