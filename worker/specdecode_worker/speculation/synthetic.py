"""Synthetic test knobs that shorten accepted paths and lengthen steps, to test the control loop on small machines."""

from __future__ import annotations

from random import Random

from specdecode_worker.contract import OTHER_TASK, SyntheticKnobs


class Synthetic:
    """Application of the synthetic knobs of a worker.

    Tokens beyond a cut are emitted again by later steps, so the text stays the same.
    """

    def __init__(self, knobs: SyntheticKnobs | None = None, seed: int = 0) -> None:
        self.knobs = knobs
        self._random = Random(seed)

    @property
    def cuts(self) -> bool:
        """True if an acceptance profile is set."""
        return self.knobs is not None and bool(self.knobs.acceptance or self.knobs.task_acceptance)

    def draw_depth_limit(self, depth: int, task: str = OTHER_TASK) -> int:
        """Draw the largest depth to which a path of ``depth`` may be accepted.

        Each depth is accepted with the probability in the profile of the task; the first failure ends the path.
        """
        profile = self.knobs and self.knobs.task_acceptance.get(task, self.knobs.acceptance)
        if not profile:
            return depth
        for level in range(depth):
            if self._random.random() >= profile[min(level, len(profile) - 1)]:
                return level
        return depth

    def least_seconds(self, sequences: int, nodes: int, context: int) -> float:
        """Return the minimum duration of a step of this size in seconds, 0 if no row of the knobs covers it."""
        for row in (self.knobs and self.knobs.step_time) or ():
            if sequences <= row.max_sequences and nodes <= row.max_nodes and context <= row.max_context:
                return row.seconds
        return 0.0
