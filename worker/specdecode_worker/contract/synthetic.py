"""Knobs that make a loop provable on two cores: truncated acceptance, padded steps."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from specdecode_worker.contract.wire import MAX_TASKS, TaskName, Written


class StepTime(Written):
    """One row of a step-time table: a step within all three bounds takes at least ``seconds``."""

    max_sequences: int = Field(default=1 << 30, ge=0)
    max_nodes: int = Field(default=1 << 30, ge=0)
    """Largest tree of the step, in nodes; 0 matches plain steps alone."""
    max_context: int = Field(default=1 << 30, ge=0)
    seconds: float = Field(ge=0, le=10)


Profile = tuple[Annotated[float, Field(ge=0, le=1)], ...]


class SyntheticKnobs(Written):
    """Proof on two cores: truncate accepted paths, pad steps. Turned on the admin port, or set from a worker's first
    step on by its environment; echoed in every report while on.

    ``acceptance[d - 1]`` is the chance that an accepted node of depth d stays accepted (the last entry repeats); a
    cut is a miss in every counter, shadow scores included, and the text stays the same. ``task_acceptance`` takes its
    place for the requests of a task. ``step_time`` pads a step to the seconds of the first row whose bounds hold it.
    """

    acceptance: Profile | None = None
    task_acceptance: dict[TaskName, Profile] = Field(default_factory=dict, max_length=MAX_TASKS)
    step_time: tuple[StepTime, ...] | None = None
