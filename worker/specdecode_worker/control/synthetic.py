"""Synthetic test knobs that shorten accepted paths and lengthen steps, to test the control loop on small machines."""

from __future__ import annotations

from collections.abc import Iterable
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
        if self.knobs is None:
            return False
        return any(knobs.acceptance or knobs.task_acceptance for knobs in (self.knobs, *self.knobs.by_draft.values()))

    def draw_depth_limit(self, depth: int, task: str = OTHER_TASK, draft: str = "") -> int:
        """Draw the largest depth to which a path of ``depth`` may be accepted.

        Each depth is accepted with the probability in the profile of the task; the first failure ends the path.

        Args:
            depth: Drafted depth of the path.
            task: Task of the request.
            draft: Hash of the draft that the request runs.
        """
        knobs = self._of(draft)
        profile = knobs and knobs.task_acceptance.get(task, knobs.acceptance)
        if not profile:
            return depth
        for level in range(depth):
            if self._random.random() >= profile[min(level, len(profile) - 1)]:
                return level
        return depth

    def least_seconds(self, sequences: int, nodes: int, context: int, drafts: Iterable[str] = ("",)) -> float:
        """Return the minimum duration of a step of this size in seconds, 0 if no row of the knobs covers it.

        Of several ``drafts`` in one step, given by their hashes, the slowest counts.
        """
        times = (self._step_seconds(self._of(draft), sequences, nodes, context) for draft in set(drafts))
        return max(times, default=0.0)

    def _of(self, draft: str) -> SyntheticKnobs | None:
        return self.knobs and self.knobs.by_draft.get(draft, self.knobs)

    @staticmethod
    def _step_seconds(knobs: SyntheticKnobs | None, sequences: int, nodes: int, context: int) -> float:
        for row in (knobs and knobs.step_time) or ():
            if sequences <= row.max_sequences and nodes <= row.max_nodes and context <= row.max_context:
                return row.seconds
        return 0.0
