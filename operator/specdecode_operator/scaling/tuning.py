"""Thresholds of scaling, with unit and reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Policy constants of the replica decision."""

    # Capacity of one worker.
    usable_slots: float = 0.8
    """Share of a worker's sequences to plan for without a TTFT objective; the rest absorbs bursts."""
    usable_cache: float = 0.9
    """Share of the KV cache to plan for; contexts differ in length, and cached prefixes take room."""
    bisections: int = 6
    """Halvings of the last interval of sequences; its ends differ by a factor of 2 at most, so 1 % remains."""
    max_log_error: float = 5.0
    """Bound on log(step time) above its mean; a step that may take 150 times as long is unknown anyway."""
    confidence_errors: float = 1.28
    """Standard errors of a lower confidence bound; the true value is above it in nine of ten cases."""

    # Demand.
    recent_seconds: float = 15.0
    """Window of the arrival rate that adds workers, in seconds; three polls, since fewer arrivals say little."""
    drain_seconds: float = 60.0
    """Time in which a backlog is to drain, in seconds; a new worker takes about as long to start."""
    urgent_wait_share: float = 0.5
    """Share of the TTFT objective; a longer mean wait adds a worker without waiting for a second poll."""
    max_wanted: int = 100_000
    """Upper bound on wanted workers; the measured capacity that demand is divided by may be next to zero."""

    # Changes of the replicas.
    polls_to_rise: int = 2
    """Consecutive polls with more demand than workers before workers are added; one poll may be a burst."""
    headroom: float = 1.1
    """Factor on demand before a worker is removed; the others must carry a tenth more than was measured."""


TUNING = Tuning()
