"""Choice of the shape that the next burst of exploration runs.

Bursts go to the shapes whose comparison with the plan is least sure: in proportion to the variance of their loss over
the square of its mean (optimal computing budget allocation; Chen, Lin, Yücesan and Chick, 2000). A shape that surely
loses gets few. The budget of exploration pays for losses, so it lasts for more bursts of the shapes that matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from specdecode_worker.contract import TreeShape

PRIOR_BURSTS, PRIOR_VARIANCE = 4.0, 0.15**2
"""Variance of the loss of one burst before any was measured, and number of bursts that it counts for. Sixteen steps of
one sequence err by about 15 %.
"""
FAR_LOSS = 0.15
"""Expected loss of a shape that is neither plain nor a neighbour of the running one, before it was measured."""
LEAST_LOSS = 0.05
"""Loss, or gain, below which a shape gets no more bursts than at this one."""
LEAST_SHARE = 0.1
"""Fewest bursts of a shape, as a share of those of the least sure shape."""


@dataclass(slots=True)
class MeasuredLoss:
    """Loss of one shape: log of its time per token over that of the plan. Mean and variance over bursts."""

    started: int = 0
    """Number of bursts, measured or not."""
    _measured: int = 0
    _mean: float = 0.0
    _squares: float = 0.0

    def add(self, loss: float) -> None:
        """Add the loss of one burst."""
        self._measured += 1
        distance = loss - self._mean
        self._mean += distance / self._measured
        self._squares += distance * (loss - self._mean)

    def need(self, expected: float) -> float:
        """Return the number of bursts that the shape should have, up to a factor. ``expected`` is its loss a priori."""
        variance = (self._squares + PRIOR_BURSTS * PRIOR_VARIANCE) / (PRIOR_BURSTS + max(0, self._measured - 1))
        return variance / max(LEAST_LOSS, abs(self._mean if self._measured else expected)) ** 2


@dataclass(slots=True)
class BurstAllocation:
    """Bursts at one load since the last change."""

    _losses: defaultdict[TreeShape, MeasuredLoss] = field(default_factory=lambda: defaultdict(MeasuredLoss))

    def next(self, shapes: Sequence[TreeShape], near: Collection[TreeShape]) -> TreeShape:
        """Return the one of the ``shapes`` that the next burst runs. ``near`` are those that may be as fast."""
        losses = [self._losses[shape] for shape in shapes]
        needs = [loss.need(0.0 if shape in near else FAR_LOSS) for shape, loss in zip(shapes, losses, strict=True)]
        least = LEAST_SHARE * max(needs)
        after = [(loss.started + 1) / max(need, least) for loss, need in zip(losses, needs, strict=True)]
        index = after.index(min(after))
        losses[index].started += 1
        return shapes[index]

    def add(self, shape: TreeShape, loss: float) -> None:
        """Add the measured loss of one burst of ``shape``."""
        self._losses[shape].add(loss)
