"""Properties of a simulated worker that neither the planner nor its policies can see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdecode_simulator.records.acceptance_walks import Records
from specdecode_simulator.records.step_times import StepTable


@dataclass(frozen=True, slots=True)
class Truth:
    """Step times and acceptance of one worker."""

    table: StepTable
    records: Records
    quality: Callable[[int, float, int], float]
    """Shift of acceptance from the recorded one, rounded, by kind of request, time and context bucket."""
    factor: Callable[[float], float]
    """Factor on this pod's step times, by time."""
    context_edges: tuple[int, ...] = (1024, 8192)
