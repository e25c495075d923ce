"""The two synthetic knobs: cut accepted paths, pad steps. Proof of a control loop on two cores, never a default."""

from __future__ import annotations

from random import Random

from specdecode_worker.contract import OTHER_TASK, SyntheticKnobs


class Synthetic:
    """Applies knobs. What it cuts is re-emitted by the next steps: the text stays the same."""

    def __init__(self, knobs: SyntheticKnobs | None = None, seed: int = 0) -> None:
        self.knobs = knobs
        self._random = Random(seed)

    @property
    def cuts(self) -> bool:
        return self.knobs is not None and bool(self.knobs.acceptance or self.knobs.task_acceptance)

    def kept_depth(self, depth: int, task: str = OTHER_TASK) -> int:
        """How deep an accepted path may stay: one coin per depth, the first that falls cuts."""
        profile = self.knobs and self.knobs.task_acceptance.get(task, self.knobs.acceptance)
        if not profile:
            return depth
        for level in range(depth):
            if self._random.random() >= profile[min(level, len(profile) - 1)]:
                return level
        return depth

    def least_seconds(self, sequences: int, nodes: int, context: int) -> float:
        """What a step of this size shall take at least."""
        for row in (self.knobs and self.knobs.step_time) or ():
            if sequences <= row.max_sequences and nodes <= row.max_nodes and context <= row.max_context:
                return row.seconds
        return 0.0
