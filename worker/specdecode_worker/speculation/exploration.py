"""What a worker spends on learning: shadow passes, and bursts of steps of other shapes, within a share of its time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from specdecode_worker.contract import TreeShape
from specdecode_worker.speculation.guard import Pace

BURST_STEPS = 16
DROPPED_STEPS = 2
"""The first steps of a burst warm caches and are not counted."""
EXPECTED_LOSS = 0.5
"""Of a burst's step, in steps at the usual pace: a burst begins once that much is saved for all of it."""


@dataclass(slots=True)
class Burst:
    """Whole-batch steps of one shape; ``done`` counts those launched."""

    shape: TreeShape
    done: int = 0


@dataclass(slots=True)
class Purse:
    """Extra seconds spent, to be held against a share of all seconds."""

    spent_seconds: float = 0.0

    def affords(self, share: float, total_seconds: float, price_seconds: float = 0.0) -> bool:
        return self.spent_seconds + price_seconds < share * total_seconds

    def pay(self, seconds: float) -> None:
        self.spent_seconds += max(seconds, 0.0)


@dataclass(slots=True)
class Exploration:
    """The account: half of the share for shadow passes, half for bursts. Seconds are measured elsewhere. What a probe
    of the guard loses is paid like a burst: whoever has just tried again what does not pay need not try it twice.

    Whatever it costs, half of the steps stay as the plan has them: what the plan runs must be timed above all, and
    exploration that happens to be faster than the plan would be free without end.
    """

    burst: Burst | None = None
    shadow: Purse = field(default_factory=Purse)
    bursts: Purse = field(default_factory=Purse)
    _rested: bool = True  # the step before drafted nothing in the shadow
    _since_burst: int = BURST_STEPS
    _total_seconds: float = 0.0
    _usual: dict[int, Pace] = field(default_factory=dict)
    _counts: Counter[tuple[int, TreeShape]] = field(default_factory=Counter)

    def shadows(self, share: float) -> bool:
        """Whether the next step may draft in the shadow."""
        due = self._rested and self.shadow.affords(share / 2, self._total_seconds)
        self._rested = not due
        return due

    def burst_for(
        self, concurrency: int, running: TreeShape, planned: TreeShape, max_depth: int, share: float
    ) -> Burst | None:
        """The burst under way, or a new one if it is affordable: of the shape that was timed least at this load
        among plain decoding, the neighbours, the deepest chain allowed and what is ``planned``, which the guard may
        hold back: the planner learns only from steps. Without a depth allowed there is none."""
        burst = self.burst
        if burst is not None and (max_depth == 0 or burst.done >= BURST_STEPS or burst.shape.depth > max_depth):
            self.burst = None
        due = self.burst is None and max_depth > 0 and self._since_burst >= BURST_STEPS
        known = self._usual.get(concurrency)
        usual = known.seconds if known else None
        price = EXPECTED_LOSS * BURST_STEPS * (usual or 0.0)
        if due and usual is not None and self.bursts.affords(share / 2, self._total_seconds, price):
            near = (0, running.depth - 1, running.depth + 1, planned.depth, max_depth)
            depths = {min(max(depth, 0), max_depth) for depth in near} - {running.depth}
            shapes = [TreeShape.chain(depth) for depth in sorted(depths)]
            if shapes:
                shape = min(shapes, key=lambda shape: self._counts[concurrency, shape])
                self._counts[concurrency, shape] += 1
                self.burst, self._since_burst = Burst(shape), 0
        return self.burst

    def passed(
        self, concurrency: int, seconds: float, tokens: float, *, explores: bool, shadow_seconds: float = 0.0
    ) -> None:
        """A step without prefill took ``seconds``, ``shadow_seconds`` of them for shadow passes, and brought
        ``tokens`` per sequence; one that ``explores`` pays what it lost by the usual pace."""
        self._total_seconds += seconds
        self.shadow.pay(shadow_seconds)
        usual = self._usual.setdefault(concurrency, Pace())
        if not explores:
            self._since_burst += 1
            usual.add(seconds - shadow_seconds, tokens)
        elif usual.seconds is not None:
            self.bursts.pay(seconds - tokens * usual.seconds)
