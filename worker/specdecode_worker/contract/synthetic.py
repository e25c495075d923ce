"""Knobs for tests of the control loop on two cores: truncated acceptance and padded steps."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from specdecode_worker.contract.wire import MAX_TASKS, TaskName, Written


class StepTime(Written):
    """One row of a step-time table: a step within all three bounds takes at least ``seconds``."""

    max_sequences: int = Field(default=1 << 30, ge=0)
    max_nodes: int = Field(default=1 << 30, ge=0)
    """Largest tree of the step in nodes. 0 matches plain steps only."""
    max_context: int = Field(default=1 << 30, ge=0)
    seconds: float = Field(ge=0, le=10)


Profile = tuple[Annotated[float, Field(ge=0, le=1)], ...]


class SyntheticKnobs(Written):
    """Truncation of accepted paths and padding of steps, for tests of the control loop.

    The knobs are set on the admin port, or by the environment from a worker's first step on. Every report repeats them
    while they are active.

    ``acceptance[d - 1]`` is the probability that an accepted node of depth d stays accepted; the last entry applies to
    all greater depths. A truncation counts as a miss in every counter, shadow scores included; the text does not
    change. ``task_acceptance`` replaces ``acceptance`` for the requests of a task. ``step_time`` pads a step to the
    seconds of the first row with bounds that contain it.
    """

    acceptance: Profile | None = None
    task_acceptance: dict[TaskName, Profile] = Field(default_factory=dict, max_length=MAX_TASKS)
    step_time: tuple[StepTime, ...] | None = None
    by_draft: dict[Annotated[str, Field(max_length=64)], SyntheticKnobs] = Field(default_factory=dict, max_length=8)
    """Knobs in place of these for requests that run the draft with this hash."""
